#!/bin/bash
# Train on the GPUs of two nodes, with the ranks started by mpirun.
#
# Usage: sbatch [SBATCH OPTIONS] hpc/train_mpirun.sh CONFIG [key=value ...]
#
# 2 nodes x 4 GPUs = 8 ranks. Load the site's MPI first, or below: module load openmpi/4.1.0
# Options given to sbatch override those below, for example sbatch --nodes=4 hpc/train_mpirun.sh config.yaml
# Two minutes before the time limit, or when it is preempted, the run saves and its job is requeued; a job
# that is submitted again by hand resumes as well.
#SBATCH --job-name=samestep
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --time=72:00:00
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
set -euo pipefail
: "${1:?usage: sbatch hpc/train_mpirun.sh CONFIG [key=value ...]}"

exec samestep launch "$@" --via mpirun --nproc "$SLURM_NTASKS"
