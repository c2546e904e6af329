#!/usr/bin/env bash
# Fuzzes every target for some seconds each (60 by default) and prints a line per target; fails on any finding.
#
#   scripts/fuzz.sh [seconds per target] [target ...]
#
# Needs a stable Rust and a C++ compiler; installs cargo-fuzz into target/tools where there is none. No sanitizer: the
# fuzzed crate has no unsafe code; overflow checks, assertions and a cap on allocations are on. Two targets run at once.
# Findings are kept in fuzz/artifacts, logs in fuzz/logs. To see one again:
#   CARGO_TARGET_DIR=target/fuzz target/tools/bin/cargo-fuzz run -s none --no-trace-compares TARGET fuzz/artifacts/TARGET/crash-…
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=${1:-60}
[[ $seconds =~ ^[1-9][0-9]*$ ]] || { echo "usage: scripts/fuzz.sh [seconds per target] [target ...]" >&2; exit 2; }
shift || true
targets=("$@")
if ((${#targets[@]} == 0)); then
    for file in fuzz/fuzz_targets/*.rs; do targets+=("$(basename "$file" .rs)"); done
fi

export PATH="$PATH:$PWD/target/tools/bin"
if ! command -v cargo-fuzz >/dev/null; then
    echo "installing cargo-fuzz into target/tools (about 2 minutes)"
    env -u CARGO_TARGET_DIR cargo install --quiet --locked cargo-fuzz@0.13.2 --root target/tools
fi
export CARGO_TARGET_DIR="${KVFERRY_FUZZ_TARGET_DIR:-$PWD/target/fuzz}"
# Traced comparisons take more than half of the time, and dictionaries and structured input find what they would.
flags=(--sanitizer none --no-trace-compares)
cargo fuzz build "${flags[@]}"
binaries=$CARGO_TARGET_DIR/$(rustc -vV | sed -n 's/^host: //p')/release

mkdir -p fuzz/logs
fuzz_one() {
    local target=$1 seed_dir=fuzz/seeds/$1 dictionary=fuzz/dictionaries/$1.dict
    mkdir -p "fuzz/corpus/$target" "fuzz/artifacts/$target"
    local corpora=("fuzz/corpus/$target")
    if [[ -d $seed_dir ]]; then corpora+=("$seed_dir"); fi
    local options=(-max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -print_final_stats=1)
    options+=(-artifact_prefix="fuzz/artifacts/$target/")
    case $target in
        descriptor) options+=(-max_len=17000) ;;
        axes_dtype) options+=(-max_len=128) ;;
        # Structured input: what is left when it runs out reads as zeros, so longer is richer from the start.
        *) options+=(-max_len=512 -len_control=0) ;;
    esac
    if [[ -f $dictionary ]]; then options+=(-dict="$dictionary"); fi
    # Not through cargo, which would build again where sources changed meanwhile.
    exec "$binaries/$target" "${options[@]}" "${corpora[@]}" >"fuzz/logs/$target.log" 2>&1
}

# One line from a log: executions, rate, edges covered, seconds.
summary() {
    local target=$1 verdict=$2 log=fuzz/logs/$1.log
    local units rate edges took
    units=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log" | tail -1)
    rate=$(sed -n 's/^stat::average_exec_per_sec: *//p' "$log" | tail -1)
    edges=$(sed -n 's/.* cov: \([0-9]*\).*/\1/p' "$log" | tail -1)
    took=$(sed -n 's/^Done [0-9]* runs in \([0-9]*\) second.*/\1/p' "$log" | tail -1)
    printf '%-13s %-5s %10s executions  %7s exec/s  %5s edges  %4s s\n' \
        "$target" "$verdict" "${units:-?}" "${rate:-?}" "${edges:-?}" "${took:-?}"
}

# Background jobs ignore an interrupt of their own.
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT

failed=0
for ((at = 0; at < ${#targets[@]}; at += 2)); do
    pair=("${targets[@]:at:2}")
    jobs=()
    for target in "${pair[@]}"; do
        fuzz_one "$target" &
        jobs+=($!)
    done
    for index in "${!pair[@]}"; do
        target=${pair[index]}
        if wait "${jobs[index]}"; then
            summary "$target" ok
        else
            failed=1
            summary "$target" FOUND
            grep -nE 'panicked at|a single allocation|ERROR: libFuzzer|^error' -A2 "fuzz/logs/$target.log" | head -12 || true
            echo "  log: fuzz/logs/$target.log; inputs: fuzz/artifacts/$target/"
        fi
    done
done
exit "$failed"
