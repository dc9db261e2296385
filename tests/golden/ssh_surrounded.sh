#!/bin/bash
# What samestep launch --via ssh starts: an agent on each host, which ends when its
# standard input does. If one fails, samestep also ends the others.
set -euo pipefail
sleep infinity | ssh -p 2222 -- a 'cd '"'"'/data/my project'"'"' && module load cuda && export A='"'"'it'"'"'"'"'"'"'"'"'s'"'"' && ulimit -n 4096 && exec /opt/venv/bin/python -m samestep launch run.yaml seed=3 '"'"'params.title=two words'"'"' --via torchrun --nodes 2 --node-rank 0 --master-addr a --master-port 30584 --attached' &
sleep infinity | ssh -p 2222 -- b 'cd '"'"'/data/my project'"'"' && module load cuda && export A='"'"'it'"'"'"'"'"'"'"'"'s'"'"' && ulimit -n 4096 && exec /opt/venv/bin/python -m samestep launch run.yaml seed=3 '"'"'params.title=two words'"'"' --via torchrun --nodes 2 --node-rank 1 --master-addr a --master-port 30584 --attached' &
wait
