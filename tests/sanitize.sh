#!/usr/bin/env bash
# Runs the op tests on the GPU under compute-sanitizer, one tool after the other: out-of-bounds and
# misaligned addresses (memcheck), races in shared memory (racecheck), memory that is read and was
# never written (initcheck), barriers that not all threads reach (synccheck).
#
#     tests/sanitize.sh [tool ...] [-- pytest's arguments]
#
# Exits 1 on the first finding or failed test, 2 when there is nothing to run it with or on.
# COMPUTE_SANITIZER names the program where it is neither on PATH nor in /usr/local/cuda.
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

program=${COMPUTE_SANITIZER:-$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)}
[[ -x $program ]] || stop "compute-sanitizer was not found: it comes with the CUDA toolkit"
reason=$(python -c 'from tinsmith import _core; print(_core.devices()["cuda"])') ||
    stop "tinsmith can't be imported: pip install -e ."
[[ -z $reason ]] || stop "$reason"

for tool in "${tools[@]}"; do
    echo "== $tool"
    options=(--tool "$tool" --error-exitcode 1 --target-processes application-only)
    "$program" "${options[@]}" python -m pytest -q -p no:cacheprovider \
        tests/test_ops.py tests/test_ops_head.py -k "cuda and not emulated" "$@" || {
        echo "tests/sanitize.sh: $tool found something, or a test failed" >&2
        exit 1
    }
done
