#!/usr/bin/env bash
# Installs the browser that the tests in this folder open pages in: Chromium.
#
#   sudo tests/browser/install.sh
#
# For Debian. Any chromium or chrome on the PATH will do: then a call costs nothing.
set -euo pipefail

fail() {
    echo "install.sh: $1" >&2
    exit 1
}

for name in chromium chromium-browser google-chrome; do
    if command -v "$name" >/dev/null; then
        echo "install.sh: $name is installed"
        exit 0
    fi
done

command -v apt-get >/dev/null || fail "no apt-get here; install chromium by hand"
[ "$(id -u)" -eq 0 ] || fail "must run as root to install chromium"

export DEBIAN_FRONTEND=noninteractive
apt-get update -q
apt-get install -q -y --no-install-recommends chromium
