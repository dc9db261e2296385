#!/bin/bash
# What samestep launch --via ssh starts: an agent on each host, which ends when its
# standard input does. If one fails, samestep also ends the others.
set -euo pipefail
sleep infinity | ssh -- a 'cd '"'"'/data/my project'"'"' && exec /opt/venv/bin/python -m samestep launch run.yaml seed=3 '"'"'params.title=two words'"'"' --via torchrun --nodes 2 --node-rank 0 --nproc 4 --master-addr a --master-port 30584 --attached' &
sleep infinity | ssh -- b 'cd '"'"'/data/my project'"'"' && exec /opt/venv/bin/python -m samestep launch run.yaml seed=3 '"'"'params.title=two words'"'"' --via torchrun --nodes 2 --node-rank 1 --nproc 2 --master-addr a --master-port 30584 --attached' &
wait
