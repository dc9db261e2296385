#!/bin/bash
# Written by samestep launch --via slurm. It may be submitted again: the run resumes from
# its newest checkpoint.
#SBATCH --job-name=tiny
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=4
#SBATCH --gpus-per-node=2
#SBATCH --partition=gpu
#SBATCH --time=12:00:00
#SBATCH --account=proj
#SBATCH --mem=64G
#SBATCH --array=0-3%2
#SBATCH --output="/data/my project/runs/tiny/slurm/%A_%a.out"
#SBATCH --open-mode=append
#SBATCH --signal=USR1@300
#SBATCH --no-requeue
#SBATCH --qos=high
#SBATCH "--constraint=a100&nvlink"
#SBATCH "--comment=two words"

set -eo pipefail
cd '/data/my project'
module load cuda/12.4
module load openmpi
export NCCL_DEBUG=INFO
export DATA='/data/it'"'"'s here'
source /opt/env.sh
ulimit -n 4096
SAMESTEP_SECRET=$(od -vAn -N32 -tx1 /dev/urandom | tr -d ' \n')
export SAMESTEP_SECRET
# One task is one rank, and finds its place in Slurm's variables.
exec srun --kill-on-bad-exit=1 --cpus-per-task=4 /opt/venv/bin/python -P -m samestep train run.yaml 'seed='"$SLURM_ARRAY_TASK_ID"'' 'params.title=two words' 'run_dir="runs/tiny/'"$SLURM_ARRAY_TASK_ID"'"' --stop-after 5
