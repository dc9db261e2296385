#!/bin/bash
# Test a decomposition on the ranks of mpirun against one process: losses, metrics and weights must be the same bits.
#
# Usage: recipes/decomposition/scripts/run_ddp_test.sh [FOLDER]
#
# NP=4 for four ranks; EXPERIMENT=language for another one than tms_5-2; STEPS=200 for longer. GPUs: as many as are visible,
# CUDA_VISIBLE_DEVICES=0,1 chooses them.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=${1:-$(mktemp -d)}
command -v mpirun >/dev/null || { echo "There is no mpirun: install or load an MPI, such as module load openmpi" >&2; exit 1; }
exec "${PYTHON:-python}" "$here/manual_test_ddp.py" "$folder" --experiment "${EXPERIMENT:-tms_5-2}" \
    --worlds "${NP:-2}" --via mpirun --steps "${STEPS:-50}"
