#!/bin/bash
# Test that ranks on several nodes can train together: minutes, without data or a model.
#
# Usage: sbatch [SBATCH OPTIONS] hpc/test_distributed.sh
#
# Barriers, broadcasts and gathers in the same order on all ranks, all-reduces whose sums are compared with what they must be, then
# what messages take. Start with two nodes; then sbatch --nodes=4 hpc/test_distributed.sh
# MASTER_PORT is derived from the job's ID; to choose another: sbatch --export=ALL,MASTER_PORT=29501 hpc/test_distributed.sh
#SBATCH --job-name=test-distributed
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=1
#SBATCH --time=00:10:00
#SBATCH --output=%x-%j.out
set -euo pipefail

# By which the ranks know each other: docs/security.md.
SAMESTEP_SECRET=$(od -vAn -N32 -tx1 /dev/urandom | tr -d ' \n')
export SAMESTEP_SECRET

# Exit code 5: warnings, such as a slow network.
status=0
srun --kill-on-bad-exit=0 samestep check || status=$?
[[ $status == 0 || $status == 5 ]] || { echo "The ranks cannot train together: see the errors above" >&2; exit "$status"; }
srun --kill-on-bad-exit=1 samestep bench comm --smallest 64KB --largest "${LARGEST:-4MB}" --rounds "${ROUNDS:-5}"
echo "The ranks of ${SLURM_JOB_NUM_NODES} nodes can train together"
