#!/bin/bash
# Written by samestep launch --via slurm. It may be submitted again: the run resumes from
# its newest checkpoint.
#SBATCH --job-name=tiny
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=4
#SBATCH --output="/data/my project/runs/tiny/slurm/%j.out"
#SBATCH --open-mode=append
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --no-kill

set -eo pipefail
cd '/data/my project'
SAMESTEP_SECRET=$(od -vAn -N32 -tx1 /dev/urandom | tr -d ' \n')
export SAMESTEP_SECRET
# An agent on each node starts that node's ranks; they meet on the job's first node.
exec srun --kill-on-bad-exit=0 --no-kill --cpus-per-task=16 /opt/venv/bin/python -P -m samestep launch run.yaml seed=3 'params.title=two words' --via torchrun --nproc 4 --nodes 1:2 --max-restarts 3
