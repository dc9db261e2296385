#!/bin/bash
# What samestep launch --via mpirun starts.
set -eo pipefail
cd '/data/my project'
export OMP_NUM_THREADS=2
export SAMESTEP_LAUNCH_ID="mpirun-$HOSTNAME-$$"
SAMESTEP_SECRET=$(od -vAn -N32 -tx1 /dev/urandom | tr -d ' \n')
export SAMESTEP_SECRET
exec mpirun -n 4 -bind-to none -genvall /opt/venv/bin/python -P -m samestep train run.yaml seed=3 'params.title=two words'
