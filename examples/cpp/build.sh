#!/usr/bin/env bash
# Builds infer with the headers and libraries of the torch that `python` imports: build.sh OUTPUT
# The headers of torch 2.13 are written in C++20.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
torch=$(python -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parent)')
abi=$(python -c 'import torch; print(int(torch.compiled_with_cxx11_abi()))')

"${CXX:-g++}" -std=c++20 -D_GLIBCXX_USE_CXX11_ABI="$abi" \
    -isystem "$torch/include" -isystem "$torch/include/torch/csrc/api/include" \
    "$here/infer.cpp" -o "$1" \
    -L"$torch/lib" -Wl,-rpath,"$torch/lib" -Wl,--no-as-needed -ltorch -ltorch_cpu -lc10
