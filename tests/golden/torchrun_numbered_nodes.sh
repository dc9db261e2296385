#!/bin/bash
# The ranks of samestep launch, by torch.distributed.run itself. Other than samestep
# launch, it listens at every address of the machine and believes whoever connects.
set -eo pipefail
cd '/data/my project'
export OMP_NUM_THREADS=2
exec /opt/venv/bin/python -m torch.distributed.run --nnodes=2 --node-rank=1 --master-addr=n0 --master-port=29500 --nproc-per-node=4 -m samestep train run.yaml seed=3 'params.title=two words'
