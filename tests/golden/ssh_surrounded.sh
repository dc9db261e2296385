#!/bin/bash
# What samestep launch --via ssh starts: an agent on each host. samestep also checks the
# hosts first, and ends all agents when one fails.
SAMESTEP_SECRET=$(od -vAn -N32 -tx1 /dev/urandom | tr -d ' \n')
export SAMESTEP_SECRET
agents=()
ssh -p 2222 -- a 'exec bash -lc '"'"'set -e
cd '"'"'"'"'"'"'"'"'/data/my project'"'"'"'"'"'"'"'"'
module load cuda
export A='"'"'"'"'"'"'"'"'it'"'"'"'"'"'"'"'"'"'"'"'"'"'"'"'"'"'"'"'"'"'"'"'"'"'"'s'"'"'"'"'"'"'"'"'
ulimit -n 4096
exec /opt/venv/bin/python -P -m samestep launch run.yaml seed=3 '"'"'"'"'"'"'"'"'params.title=two words'"'"'"'"'"'"'"'"' --read-secret --via torchrun --nodes 2 --node-rank 0 --master-addr a --master-port 30584'"'"'' <<<"$SAMESTEP_SECRET" &
agents+=($!)
ssh -p 2222 -- b 'exec bash -lc '"'"'set -e
cd '"'"'"'"'"'"'"'"'/data/my project'"'"'"'"'"'"'"'"'
module load cuda
export A='"'"'"'"'"'"'"'"'it'"'"'"'"'"'"'"'"'"'"'"'"'"'"'"'"'"'"'"'"'"'"'"'"'"'"'s'"'"'"'"'"'"'"'"'
ulimit -n 4096
exec /opt/venv/bin/python -P -m samestep launch run.yaml seed=3 '"'"'"'"'"'"'"'"'params.title=two words'"'"'"'"'"'"'"'"' --read-secret --via torchrun --nodes 2 --node-rank 1 --master-addr a --master-port 30584'"'"'' <<<"$SAMESTEP_SECRET" &
agents+=($!)
code=0
for agent in "${agents[@]}"; do wait "$agent" || code=$?; done
exit "$code"
