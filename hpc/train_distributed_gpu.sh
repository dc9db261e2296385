#!/bin/bash
# Train on the GPUs of two nodes: one process for each GPU, over nccl.
#
# Usage: sbatch [SBATCH OPTIONS] hpc/train_distributed_gpu.sh CONFIG [key=value ...]
#
# 2 nodes x 4 GPUs = 8 ranks.
# Options given to sbatch override those below, for example sbatch --nodes=4 hpc/train_distributed_gpu.sh config.yaml
# Two minutes before the time limit, or when it is preempted, the run saves and its job is requeued; a job
# that is submitted again by hand resumes as well.
#SBATCH --job-name=samestep
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=72:00:00
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --signal=USR1@120
#SBATCH --requeue
set -euo pipefail
: "${1:?usage: sbatch hpc/train_distributed_gpu.sh CONFIG [key=value ...]}"

# By which the ranks know each other: docs/security.md.
SAMESTEP_SECRET=$(od -vAn -N32 -tx1 /dev/urandom | tr -d ' \n')
export SAMESTEP_SECRET

exec srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" samestep train "$@"
