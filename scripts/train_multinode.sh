#!/bin/bash
# Train on several machines without a scheduler. Start it on each of them.
#
# Usage: scripts/train_multinode.sh --config FILE --nnodes N --node_rank R --master_addr HOST
#            [--master_port PORT] [--num_gpus N] [key=value ...] [-- OPTIONS]
#
#   --config FILE        the run's config, under the same path on all machines
#   --nnodes N           the number of machines
#   --node_rank R        this machine's number, from 0; machine 0 has rank 0
#   --master_addr HOST   machine 0, by a name or address that all machines can reach
#   --master_port PORT   a free port there; default: 29500
#   --num_gpus N         ranks on this machine, one per GPU; default: all GPUs
#   key=value            config values, the same on all machines
#   -- OPTIONS           further options of samestep launch, such as --print
#   -h, --help           this text
#
# The machines know each other by a secret: first export SAMESTEP_SECRET, the same on all of them, such as
# the output of: openssl rand -hex 32
#
# Example, on the second of two machines:
#   scripts/train_multinode.sh --config config.yaml --nnodes 2 --node_rank 1 --master_addr gpu01
set -euo pipefail

usage() { sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; }
fail() { echo "$(basename "$0"): $1; see --help" >&2; exit 2; }

# The options of samestep launch for the names that are usual here.
declare -A names=(
    [--num_gpus]=--nproc [--nproc_per_node]=--nproc [--nnodes]=--nodes
    [--node_rank]=--node-rank [--master_addr]=--master-addr [--master_port]=--master-port
)

config="" options=() overrides=() given=" "
while [[ $# -gt 0 ]]; do
    option=${1%%=*}
    option=--$(tr - _ <<<"${option#--}")
    case $1 in
    -h | --help) usage; exit 0 ;;
    --) shift; options+=("$@"); break ;;
    --*)
        [[ $option == --config || -n ${names[$option]:-} ]] || fail "unknown option $1"
        if [[ $1 == *=* ]]; then value=${1#*=}; shift
        else [[ $# -ge 2 ]] || fail "$1 needs a value"; value=$2; shift 2; fi
        given+="$option "
        if [[ $option == --config ]]; then config=$value
        else options+=("${names[$option]}" "$value"); fi ;;
    -*) fail "unknown option $1" ;;
    *=*) overrides+=("$1"); shift ;;
    *) fail "unexpected argument $1" ;;
    esac
done
for needed in --config --nnodes --node_rank --master_addr; do
    [[ $given == *" $needed "* ]] || fail "$needed is missing"
done
command -v samestep >/dev/null || fail "samestep is not on PATH: activate its environment"

exec samestep launch "$config" "${overrides[@]}" --via torchrun "${options[@]}"
