#!/usr/bin/env bash
# Installs what the tests in this folder run: Slurm, two MPIs, ssh and the namespace tools.
#
#   sudo tests/cluster/install.sh
#
# For Debian and Ubuntu. Packages that are there already are left alone, so a second call costs
# nothing, and no service is started: the tests start their own.
set -euo pipefail

packages=(
    slurm-wlm munge openmpi-bin mpich libpmix-dev
    openssh-server openssh-client iproute2 util-linux shellcheck
)

fail() {
    echo "install.sh: $1" >&2
    exit 1
}

command -v apt-get >/dev/null || fail "no apt-get here; install by hand: ${packages[*]}"

missing=()
for package in "${packages[@]}"; do
    status=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) || status=unknown
    [ "$status" = installed ] || missing+=("$package")
done
if [ ${#missing[@]} -eq 0 ]; then
    echo "install.sh: everything is installed"
    exit 0
fi

[ "$(id -u)" -eq 0 ] || fail "must run as root to install: ${missing[*]}"

# Debian asks this file whether a package may start its service; 101 is no.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
fi

export DEBIAN_FRONTEND=noninteractive
apt-get update -q
apt-get install -q -y --no-install-recommends "${missing[@]}"
