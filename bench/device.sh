#!/usr/bin/env bash
# Everything that needs a GPU, in under 8 minutes: tests, memory check, calibration, benchmarks.
#
#   bench/device.sh OUT_DIR              on a GPU
#   bench/device.sh OUT_DIR --dry-run    every step on the CPU, small
#
# Runs from a checkout; installs nothing. Needs a Python with torch, numpy and triton (PYTHON=...
# names it); cupy, pytest, hypothesis, matplotlib, rich and nvidia-ml-py are used where they are.
# A step that fails is reported and the next one runs; the exit status is 1 if any failed.
set -u

usage() { echo "usage: bench/device.sh OUT_DIR [--dry-run]" >&2; exit 2; }

dry=()
out=""
for argument in "$@"; do
    case "$argument" in
        --dry-run) dry=(--dry-run) ;;
        -*) usage ;;
        *) [ -z "$out" ] || usage; out=$argument ;;
    esac
done
[ -n "$out" ] || usage
mkdir -p "$out" || exit 2
out=$(cd "$out" && pwd)
python=${PYTHON:-python3}
case $python in /*) ;; */*) python=$PWD/$python ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
rm -f "$out"/{steps.tsv,summary.json,calibration.json,transfer.json,interference.json,reload.json}
: > "$out/steps.tsv"

has() { "$python" -c "import importlib.util, sys; sys.exit(any(
    importlib.util.find_spec(name) is None for name in sys.argv[1:]))" "$@"; }

if [ -z "${PYTHON:-}" ] && ! has torch && [ -x .venv/bin/python ]; then python=.venv/bin/python; fi
has torch numpy || { echo "device.sh: $python has no torch; set PYTHON=" >&2; exit 2; }
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 MPLBACKEND=Agg
sees_gpu="import torch, sys; sys.exit(not torch.cuda.is_available())"
if [ ${#dry[@]} -eq 0 ] && ! "$python" -c "$sees_gpu"; then
    echo "device.sh: torch sees no GPU here; give --dry-run to run every step on the CPU" >&2
    exit 2
fi

SECONDS=0
limit_s=465
[ ${#dry[@]} -eq 0 ] || limit_s=240

record() { printf '%s\t%s\t%s\t%s\n' "$@" >> "$out/steps.tsv"; }

# step NAME SECONDS COMMAND...: its output goes to NAME.log.
step() {
    local name=$1 seconds=$2 status=ok note=${ok_note:-} code start=$SECONDS left
    shift 2
    left=$((limit_s - SECONDS))
    [ "$seconds" -le "$left" ] || seconds=$left
    if [ "$seconds" -le 0 ]; then
        record "$name" failed 0 "no time left"
        echo "failed  $name: no time left"
        return
    fi
    echo "$name ..."
    timeout -k 5 "$seconds" "$@" > "$out/$name.log" 2>&1
    code=$?
    if [ $code -eq 124 ] || [ $code -eq 137 ]; then
        status=failed note="took more than $seconds s"
    elif [ $code -ne 0 ] && [ "$name" = memcheck ] &&
        grep -q -i "device not supported" "$out/$name.log"; then
        status=skipped note="compute-sanitizer does not support this device"
    elif [ $code -ne 0 ]; then
        status=failed note="exit status $code, see $name.log"
        tail -n 8 "$out/$name.log"
    fi
    record "$name" "$status" $((SECONDS - start)) "$note"
    echo "$status  $name ($((SECONDS - start)) s) $note"
}

live=("$python" -m liveserve.cli bench)

# 1. Bytes, stream order and big offsets of every copy method.
if has pytest hypothesis; then
    tests=(tests/test_kernels_gpu.py)
    [ ${#dry[@]} -eq 0 ] || tests+=(tests/test_kernels_calibrate.py)
    step kernels 120 "$python" -m pytest -q -p no:cacheprovider "${tests[@]}"
else
    step kernels 120 "${live[@]}" transfer "${dry[@]}" --refcheck --repeats 1 --compute idle \
        --sizes 4096 16384 262144 --counts 48 960
fi

# 2. The same kernels under a memory checker.
checker=()
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
if [ ${#dry[@]} -eq 0 ] && [ -n "$sanitizer" ]; then
    checker=("$sanitizer" --tool memcheck --error-exitcode 9)
fi
if [ ${#dry[@]} -eq 0 ] && [ -z "$sanitizer" ]; then
    record memcheck skipped 0 "compute-sanitizer is not installed"
    echo "skipped  memcheck: compute-sanitizer is not installed"
else
    [ ${#dry[@]} -eq 0 ] || ok_note="without compute-sanitizer"
    step memcheck 70 "${checker[@]}" "${live[@]}" transfer "${dry[@]}" --refcheck --repeats 1 \
        --max-mib 2 --sizes 4096 65536 --counts 96 --traffic load store --compute idle
    ok_note=""
fi

# 3. The chooser's table for this machine.
step calibrate 65 "${live[@]}" calibrate "$out/calibration.json" "${dry[@]}" --budget-s 45
table=()
[ ! -s "$out/calibration.json" ] || table=(--table "$out/calibration.json")

# 4. Every method, alone and in both directions at once; then beside a decode-like loop.
step transfer 115 "${live[@]}" transfer "${dry[@]}" --refcheck --compute idle --budget-s 90 \
    "${table[@]}" --json "$out/transfer.json" --plot "$out/transfer.png"
sizes=(4096 16384 65536 524288 2097152)
[ ${#dry[@]} -eq 0 ] || sizes=(4096 65536)
step interference 70 "${live[@]}" transfer "${dry[@]}" --compute decode --budget-s 45 \
    "${table[@]}" --sizes "${sizes[@]}" \
    --json "$out/interference.json" --plot "$out/interference.png"

# 5. What a turn waits for.
step reload 70 "${live[@]}" reload "${dry[@]}" "${table[@]}" \
    --json "$out/reload.json" --plot "$out/reload.png" --trace "$out/reload.trace.json"

"$python" -m liveserve.bench.device_summary "$out"
summary=$?
echo "results are in $out ($SECONDS s)"
! grep -q -P '\tfailed\t' "$out/steps.tsv" && [ $summary -eq 0 ]
