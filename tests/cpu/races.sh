#!/usr/bin/env bash
# Runs the engine and the server under the thread sanitizer: the crew of threads alone (crew.c), and
# then calls of the engine and of a server from four threads at once (races.py).
#
#     tests/cpu/races.sh [rounds of races.py]
#
# Exits 1 where threads raced or got other bits than one alone, 2 when there is nothing to run it
# with. The build takes some minutes and lies in a folder of its own. Python and its libraries are
# not built for the sanitizer: what happens in them alone is not looked at, and neither are threads
# that the SDK's HTTP client leaves behind.
set -euo pipefail
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

library=$(gcc -print-file-name=libtsan.so)
[[ -e $library ]] || {
    echo "tests/cpu/races.sh: gcc's thread sanitizer was not found (Debian's libtsan2)" >&2
    exit 2
}
export TSAN_OPTIONS="ignore_noninstrumented_modules=1 report_thread_leaks=0 exitcode=1"

echo "== the crew"
gcc -std=c11 -O1 -g -fsanitize=thread -Icsrc tests/cpu/crew.c csrc/cpu/runtime/pool.c csrc/device/status.c \
    -o "$work/crew"
for sizes in "1 4" "4 4" "4 2"; do
    # shellcheck disable=SC2086
    "$work/crew" $sizes 5
done

echo "== the engine and the server"
cp -r python "$work/python"
TINSMITH_SANITIZE=thread python setup.py --quiet build_ext --build-temp "$work/objects" \
    --build-lib "$work/python" -j2
PYTHONPATH="$work/python:.:tests" OPENBLAS_NUM_THREADS=1 LD_PRELOAD="$library" \
    python tests/cpu/races.py "${1:-1}"
