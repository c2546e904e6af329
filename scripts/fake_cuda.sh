#!/usr/bin/env bash
# Builds the simulated CUDA driver (cuda/fake) and prints the folder to put first on LD_LIBRARY_PATH.
#
#   scripts/fake_cuda.sh [--sanitize address|thread|undefined] [--batch both|v1|v2|none] [--test] [OUTDIR]
#
# --batch says which of the two signatures of cuMemcpyBatchAsync the driver has. --test also builds and runs the
# self-test. OUTDIR defaults to target/fake-cuda. Needs g++ (or $CXX); takes a few seconds, and none if nothing changed.
#
# OUTDIR/nvcc is a stand-in for the compiler, for machines without one: `NVCC=OUTDIR/nvcc cargo test` builds modules that
# only the simulated driver loads.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cxx=${CXX:-g++}
out= sanitize= batch=both test=
while [ $# -gt 0 ]; do
  case $1 in
    --sanitize) sanitize=$2; shift ;;
    --batch) batch=$2; shift ;;
    --test) test=1 ;;
    -*) echo "fake_cuda.sh: unknown option $1" >&2; exit 2 ;;
    *) out=$1 ;;
  esac
  shift
done
out=${out:-${CARGO_TARGET_DIR:-$root/target}/fake-cuda}
flags=(-std=c++17 -O2 -g -fPIC -fvisibility=hidden -Wall -Wextra -I"$root/cuda/include" -pthread)
[ -z "$sanitize" ] || flags+=("-fsanitize=$sanitize" -fno-omit-frame-pointer)
case $batch in
  both) ;;
  v1) flags+=(-DKVF_FAKE_NO_BATCH_V2) ;;
  v2) flags+=(-DKVF_FAKE_NO_BATCH_V1) ;;
  none) flags+=(-DKVF_FAKE_NO_BATCH_V1 -DKVF_FAKE_NO_BATCH_V2) ;;
  *) echo "fake_cuda.sh: --batch $batch is none of both, v1, v2, none" >&2; exit 2 ;;
esac

mkdir -p "$out/obj"
# Sources whose object is older than them, than any header or than other flags are compiled, two at a time.
if [ "$(cat "$out/obj/flags" 2>/dev/null)" != "$cxx ${flags[*]}" ]; then rm -f "$out"/obj/*.o; fi
echo "$cxx ${flags[*]}" > "$out/obj/flags"
newest=$(ls -t "$root"/cuda/fake/*.h "$root"/cuda/host/fiber.hpp "$root"/cuda/include/kvferry/*.cuh | head -1)
objects=() todo=()
for source in "$root"/cuda/fake/*.cpp "$root"/cuda/host/fiber.cpp; do
  object=$out/obj/$(basename "$source" .cpp).o
  objects+=("$object")
  if [ ! "$object" -nt "$source" ] || [ ! "$object" -nt "$newest" ]; then todo+=("$source"); fi
done
if [ ${#todo[@]} -gt 0 ]; then
  printf '%s\n' "${todo[@]}" | xargs -P "${JOBS:-2}" -I{} sh -c \
    'object=$1/obj/$(basename "$2" .cpp).o; shift 2; "$@" -c "$0" -o "$object"' {} "$out" {} "$cxx" "${flags[@]}" >&2
fi
if [ ${#todo[@]} -gt 0 ] || [ ! -e "$out/libcuda.so.1" ]; then
  # The name appears only when the library is whole: others may be about to load it. Never unloaded: it has threads.
  "$cxx" "${flags[@]}" -shared -Wl,-soname,libcuda.so.1 -Wl,-z,nodelete "${objects[@]}" -ldl -o "$out/libcuda.new"
  mv -f "$out/libcuda.new" "$out/libcuda.so.1"
fi
ln -sf libcuda.so.1 "$out/libcuda.so"
cat > "$out/nvcc.new" <<'NVCC'
#!/bin/sh
# Stands in for nvcc 13.0: writes something with a fatbin's first bytes. The simulated driver knows kernels by name.
[ "$1" = --version ] && { echo "simulated: release 13.0, V13.0.0"; exit 0; }
for source; do :; done
while [ $# -gt 0 ]; do
  case "$1" in
    -MF) echo "out : $source" > "$2"; shift ;;
    -o) printf '\120\355\125\272simulated' > "$2"; shift ;;
  esac
  shift
done
NVCC
chmod +x "$out/nvcc.new"
if cmp -s "$out/nvcc.new" "$out/nvcc"; then rm "$out/nvcc.new"; else mv "$out/nvcc.new" "$out/nvcc"; fi
if [ -n "$test" ]; then
  "$cxx" "${flags[@]}" "$root"/cuda/fake/selftest/*.cpp -ldl -o "$out/selftest" >&2
  for with in CHECK=0 CHECK=1 JITTER_US=500; do
    env "KVFERRY_FAKE_$with" LD_LIBRARY_PATH="$out${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" "$out/selftest" >&2
  done
fi
echo "$out"
