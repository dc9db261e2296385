#!/bin/bash
# Train on the GPUs (or CPUs) of this machine, with ranks as the legacy torch.distributed.launch starts them.
#
# Usage: scripts/train_dist_launch.sh --config FILE [--num_gpus N] [key=value ...] [-- OPTIONS]
#
#   --config FILE   the run's config
#   --num_gpus N    ranks on this machine, one per GPU; default: all GPUs
#   key=value       config values, such as seed=3 or params.lr=0.01
#   -- OPTIONS      further options of samestep launch, such as --max-restarts 3 or --print
#   -h, --help      this text
#
# Example: scripts/train_dist_launch.sh --num_gpus 4 --config config.yaml epochs=20
set -euo pipefail

usage() { sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; }
fail() { echo "$(basename "$0"): $1; see --help" >&2; exit 2; }

config="" options=() overrides=()
while [[ $# -gt 0 ]]; do
    case $1 in
    --config | --num_gpus | --num-gpus) [[ $# -ge 2 ]] || fail "$1 needs a value" ;;&
    --config) config=$2; shift 2 ;;
    --num_gpus | --num-gpus) options+=(--nproc "$2"); shift 2 ;;
    --config=*) config=${1#*=}; shift ;;
    --num_gpus=* | --num-gpus=*) options+=(--nproc "${1#*=}"); shift ;;
    -h | --help) usage; exit 0 ;;
    --) shift; options+=("$@"); break ;;
    -*) fail "unknown option $1" ;;
    *=*) overrides+=("$1"); shift ;;
    *) fail "unexpected argument $1" ;;
    esac
done
[[ -n $config ]] || fail "--config is missing"
command -v samestep >/dev/null || fail "samestep is not on PATH: activate its environment"

exec samestep launch "$config" "${overrides[@]}" --via torch.distributed.launch "${options[@]}"
