#!/bin/bash
# Written by samestep launch --via slurm. It may be submitted again: the run resumes from
# its newest checkpoint.
#SBATCH --job-name=tiny
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --output="/data/my project/runs/tiny/slurm/%j.out"
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120
#SBATCH --requeue

set -eo pipefail
cd '/data/my project'
SAMESTEP_SECRET=$(od -vAn -N32 -tx1 /dev/urandom | tr -d ' \n')
export SAMESTEP_SECRET
# mpirun starts the ranks on all nodes of the job.
exec /opt/venv/bin/python -P -m samestep launch run.yaml seed=3 'params.title=two words' --via mpirun --nproc 8
