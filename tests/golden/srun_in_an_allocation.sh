#!/bin/bash
# What samestep launch --via srun starts, inside of an allocation.
set -eo pipefail
cd '/data/my project'
export SAMESTEP_LAUNCH_ID="srun-$HOSTNAME-$$"
SAMESTEP_SECRET=$(od -vAn -N32 -tx1 /dev/urandom | tr -d ' \n')
export SAMESTEP_SECRET
unset SLURM_MEM_PER_NODE SLURM_GPUS SLURM_GPUS_PER_NODE SLURM_GRES SLURM_NTASKS_PER_NODE
exec srun --nodes=2 --ntasks=4 --ntasks-per-node=2 --exact --kill-on-bad-exit=1 --cpus-per-task=2 --mem=8000M --gpus-per-node=2 /opt/venv/bin/python -P -m samestep train run.yaml seed=3 'params.title=two words'
