#!/bin/bash
# What samestep launch --via mpirun starts.
set -eo pipefail
cd '/data/my project'
export MASTER_ADDR=a
export OMP_NUM_THREADS=2
export SAMESTEP_LAUNCH_ID="mpirun-$HOSTNAME-$$"
SAMESTEP_SECRET=$(od -vAn -N32 -tx1 /dev/urandom | tr -d ' \n')
export SAMESTEP_SECRET
exec mpirun -np 4 --host a:2,b:2 --bind-to none -x SAMESTEP_LAUNCH_ID -x MASTER_ADDR -x OMP_NUM_THREADS -x SAMESTEP_SECRET -x NCCL_DEBUG -x PATH -x SAMESTEP_X /opt/venv/bin/python -P -m samestep train run.yaml seed=3 'params.title=two words'
