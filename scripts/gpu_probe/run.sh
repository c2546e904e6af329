#!/usr/bin/env bash
# Compiles the probe and runs it on this machine's GPU; tables go to stdout and $OUT/probe.txt (default: .).
# Arguments: letters of sections (see probe.cu), none for all.
set -euo pipefail
cd "$(dirname "$0")/../.."
out="${OUT:-.}"
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
"${NVCC:-nvcc}" -O3 -arch=sm_90 -std=c++17 -I cuda/include -I scripts/gpu_probe -o "$build/probe" scripts/gpu_probe/probe.cu
timeout -k 5 "${PROBE_SECONDS:-150}" "$build/probe" "$@" 2>&1 | tee "$out/probe.txt"
