#!/bin/bash
# Train on two CPU nodes: one process on each, over gloo.
#
# Usage: sbatch [SBATCH OPTIONS] hpc/train_distributed.sh CONFIG [key=value ...]
#
# 2 nodes x 1 process x 40 threads = 80 cores.
# Options given to sbatch override those below, for example sbatch --cpus-per-task=64 hpc/train_distributed.sh config.yaml
# Two minutes before the time limit, or when it is preempted, the run saves and its job is requeued; a job
# that is submitted again by hand resumes as well.
#SBATCH --job-name=samestep
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=40
#SBATCH --time=72:00:00
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --signal=USR1@120
#SBATCH --requeue
set -euo pipefail
: "${1:?usage: sbatch hpc/train_distributed.sh CONFIG [key=value ...]}"

# All CPUs of a task as threads of its rank. The last bits of a run depend on their number: keep it, or
# start more tasks of one CPU each (up to the number of lanes), whose bits do not depend on how many they are.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"

# By which the ranks know each other: docs/security.md.
SAMESTEP_SECRET=$(od -vAn -N32 -tx1 /dev/urandom | tr -d ' \n')
export SAMESTEP_SECRET

exec srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" samestep train "$@"
