#!/usr/bin/env bash
# Runs the host build of the kernels under the address and undefined-behaviour sanitizers (gcc or clang, Linux).
# Arguments are passed to `cargo test`, e.g. `scripts/sanitize.sh -- negative`.
set -euo pipefail
cd "$(dirname "$0")/.."

host=$(rustc -vV | sed -n 's/^host: //p')
export KVFERRY_SANITIZE=1
# The kernels under test are the C++ bodies: no fatbin is needed, and none is waited for.
export KVFERRY_CUDA=off
# Let the linker driver add the sanitizer runtimes. An explicit --target keeps the flags away from build scripts and
# procedural macros, which rustc itself loads.
export RUSTFLAGS="${RUSTFLAGS:-} -C default-linker-libraries=yes -C linker=${CXX:-g++} -C link-arg=-fsanitize=address,undefined"
export CXX="${CXX:-g++}"
export CARGO_TARGET_DIR="${KVFERRY_SANITIZE_TARGET_DIR:-${CARGO_TARGET_DIR:-target}/sanitize}"
export ASAN_OPTIONS="abort_on_error=0:detect_stack_use_after_return=0:${ASAN_OPTIONS:-}"
export UBSAN_OPTIONS="print_stacktrace=1:halt_on_error=1:${UBSAN_OPTIONS:-}"
exec cargo test -p kvferry-kernels --target "$host" --test host_kernels "$@"
