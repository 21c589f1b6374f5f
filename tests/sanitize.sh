#!/usr/bin/env bash
# Runs the op tests on the GPU under compute-sanitizer's four tools, side by side: out-of-bounds and
# misaligned addresses (memcheck), races in shared memory (racecheck), memory that is read and was
# never written (initcheck), barriers that not all threads reach (synccheck).
#
#     tests/sanitize.sh [tool ...] [-- pytest's arguments]
#
# What each tool says is in a file of its own, in SANITIZE_OUT (else a new folder). One that has not
# ended after SANITIZE_LIMIT seconds (3600) is stopped. Says of each how it ended, with the end of
# its file where it found something. Exits 1 if any did not end well, 2 when there is nothing to run
# it with or on. COMPUTE_SANITIZER names the program where it is neither on PATH nor in
# /usr/local/cuda, PYTHON the interpreter (python3).
set -euo pipefail
cd "$(dirname "$0")/.."

stop() {
    echo "tests/sanitize.sh: $1" >&2
    exit 2
}

tools=()
while (($#)) && [[ $1 != -- ]]; do
    case $1 in
    memcheck | racecheck | initcheck | synccheck) tools+=("$1") ;;
    *) stop "there is no tool '$1': memcheck, racecheck, initcheck or synccheck" ;;
    esac
    shift
done
(($# == 0)) || shift
((${#tools[@]})) || tools=(memcheck racecheck initcheck synccheck)

python=${PYTHON:-python3}
limit=${SANITIZE_LIMIT:-3600}
[[ $limit =~ ^[1-9][0-9]*$ ]] || stop "SANITIZE_LIMIT must be seconds, a whole number: '$limit' came"
program=${COMPUTE_SANITIZER:-$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)}
[[ -x $program ]] || stop "compute-sanitizer was not found: it comes with the CUDA toolkit"
reason=$("$python" -c 'from tinsmith import _core; print(_core.devices("cuda")["cuda"])') ||
    stop "tinsmith can't be imported: pip install -e ."
[[ -z $reason ]] || stop "$reason"
out=${SANITIZE_OUT:-$(mktemp -d)}
mkdir -p "$out"

declare -A started
for tool in "${tools[@]}"; do
    options=(--tool "$tool" --error-exitcode 1 --target-processes application-only)
    timeout -k 10 "$limit" "$program" "${options[@]}" "$python" -m pytest -q -p no:cacheprovider \
        -o addopts= tests/test_ops.py tests/test_ops_head.py -k "cuda and not emulated" "$@" \
        >"$out/$tool.log" 2>&1 &
    started[$tool]=$!
done

failed=0
for tool in "${tools[@]}"; do
    code=0
    wait "${started[$tool]}" || code=$?
    case $code in
    0) said="nothing found" ;;
    124 | 137) said="stopped after $limit s" ;;
    *) said="found something, or a test failed" ;;
    esac
    echo "== $tool: $said ($out/$tool.log)"
    ((code == 0)) && continue
    failed=1
    tail -n 20 "$out/$tool.log"
done
exit $failed
