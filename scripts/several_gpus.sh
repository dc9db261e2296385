#!/usr/bin/env bash
# Everything that only a machine with several GPUs can show: NCCL between them, SyncBatchNorm, the GPU tests,
# and all measurements. Run it in a clone, once `make setup` is done.
#
# Usage: scripts/several_gpus.sh [FOLDER]
#
#   FOLDER          gets the logs, the results and the report; default: several-gpus
#   -h, --help      this text
set -euo pipefail

usage() { sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; }
case ${1:-} in
    -h | --help) usage; exit 0 ;;
    -*) echo "$(basename "$0"): unknown option $1; see --help" >&2; exit 2 ;;
esac

cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
folder=$(realpath -m "${1:-several-gpus}")

gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
if [ "$gpus" -lt 2 ]; then
  echo "this machine has $gpus GPU(s). Not measurable here: NCCL between GPUs, SyncBatchNorm, and scaling beyond one GPU."
  if [ "$gpus" -eq 1 ]; then
    echo "What one GPU can show: $python -m pytest -m gpu; samestep bench scaling --worlds 1; samestep bench memory --worlds 1"
  else
    echo "What CPUs can show: make test; samestep bench scaling --quick"
  fi
  exit 3
fi

worlds=1
for world in 2 4 8 16; do
  if [ "$world" -le "$gpus" ]; then worlds=$worlds,$world; fi
done

mkdir -p "$folder"
failed=()

part() {
  local name=$1
  shift
  echo "== $name: $*"
  if ! "$@" 2>&1 | tee "$folder/$name.log"; then
    failed+=("$name")
  fi
}

config=$folder/starter/config.yaml
[ -e "$config" ] || part init "$python" -m samestep init "$config" --global-batch 128 --lanes 16
part check "$python" -m samestep check
part nccl-verify "$python" -m samestep verify "$config" distributed.backend=nccl run_dir="$folder/run" --worlds "$worlds" \
  --shards none,optimizer,weights --steps 20
part sync-batchnorm "$python" -m samestep launch --nproc "$gpus" "$config" \
  run_dir="$folder/sync-batchnorm" same=samples distributed.sync_batchnorm=true distributed.backend=nccl
part gpu-tests "$python" -m pytest -q -m gpu
mkdir -p "$folder/results"
part scaling "$python" -m samestep bench scaling --worlds "$worlds" --output "$folder/results/scaling.json"
part memory "$python" -m samestep bench memory --worlds "$worlds" --output "$folder/results/memory.json"
part nccl "$python" -m samestep bench comm --worlds "${worlds#1,}" --output "$folder/results/comm.json"
# Beside nccl's messages, which are among the results already.
part gloo "$python" -m samestep bench comm "$config" distributed.backend=gloo --worlds "${worlds#1,}" \
  --output "$folder/results/comm-gloo.json"
part report "$python" -m samestep bench report "$folder"/results/*.json --report "$folder/report.html"

if [ "${#failed[@]}" -gt 0 ]; then
  echo "failed: ${failed[*]}; their logs are in $folder"
  exit 1
fi
echo "all of it passed; the report is $folder/report.html"
