#!/bin/bash
# Find out what would go wrong on the nodes of a job, before it does.
#
# Usage: sbatch [SBATCH OPTIONS] hpc/diagnose.sh [CONFIG [key=value ...]]
#
# Prints what was detected on the first node, with the reasons, then what the ranks find on their machines and between them:
# docs/check.md. Ask for the nodes of the training: sbatch --nodes=4 hpc/diagnose.sh config.yaml
#SBATCH --job-name=diagnose
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=40
#SBATCH --time=00:10:00
#SBATCH --output=%x-%j.out
set -euo pipefail

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"

# By which the ranks know each other: docs/security.md.
SAMESTEP_SECRET=$(od -vAn -N32 -tx1 /dev/urandom | tr -d ' \n')
export SAMESTEP_SECRET

echo "Nodes: ${SLURM_JOB_NODELIST}"
srun --nodes=1 --ntasks=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" samestep check --facts
exec srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" samestep check "$@"
