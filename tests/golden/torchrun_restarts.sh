#!/bin/bash
# The ranks of samestep launch, by torch.distributed.run itself. Other than samestep
# launch, it listens at every address of the machine and believes whoever connects.
set -eo pipefail
cd '/data/my project'
export OMP_NUM_THREADS=2
exec /opt/venv/bin/python -m torch.distributed.run --standalone --nproc-per-node=4 --max-restarts=2 -m samestep train run.yaml seed=3 'params.title=two words'
