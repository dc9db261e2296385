#!/bin/bash
# Decompose a language model on the nodes of a Slurm job, with the ranks started by mpirun.
#
# Usage, from the root of the project: sbatch [SBATCH OPTIONS] recipes/decomposition/scripts/decompose.sh [CONFIG [key=value ...]]
#
# 2 nodes x 2 ranks; with --gpus-per-node=2 a GPU for each. The target is trained first, on the first node, unless it is there already.
# Four ranks are what four.yaml expects: for others give single.yaml, which takes any number up to its lanes. The batch stays the same.
#SBATCH --job-name=decompose
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --time=72:00:00
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
set -euo pipefail
config=${1:-recipes/decomposition/config/language/four.yaml}
shift || true

# The site's MPI, if it is not loaded yet: module load openmpi
target=$(dirname "$config")/target.yaml
name=$(basename "$(dirname "$config")")
[[ -f runs/$name-target/files/target.pt ]] || samestep train "$target"
exec samestep launch "$config" "$@" --via mpirun --nproc "$SLURM_NTASKS"
