#!/usr/bin/env bash
# On one GPU, in under 8 minutes: the gpu tests, the speed table, the equality table; then one summary.
#
#   tests/gpu_check.sh [OUT]                    OUT: folder for logs and JSON (a new temporary one)
#   ALOHA_ROOT=DIR tests/gpu_check.sh [OUT]     also trains on that LeRobot data set and acts in gym-aloha
#                                               (more flags for it in ALOHA_FLAGS; ALOHA_STEPS, 2000)
# PYTHON names the interpreter (python3).
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=${1:-$(mktemp -d)}
mkdir -p "$out"
failed=0
begin=$SECONDS

stage() { # NAME SECONDS COMMAND...: run with a limit, log to OUT/NAME.log, note how it ended
    local name=$1 limit=$2 start=$SECONDS code
    shift 2
    timeout --kill-after 10 "$limit" "$@" >"$out/$name.log" 2>&1
    code=$?
    ((code == 0)) || failed=1
    echo "$name: exit code $code, $((SECONDS - start)) s (124: stopped at its limit of $limit s)" | tee -a "$out/summary.txt"
}

: >"$out/summary.txt"
stage tests 110 "$python" -m pytest -m gpu -p no:cacheprovider
stage speed 240 "$python" bench.py speed --device cuda --steps "${SPEED_STEPS:-300}" --json "$out/speed.json"
stage equality 120 "$python" bench.py equality --device cuda --steps 30 --json "$out/equality.json" \
    --precisions float32 bf16 --layouts single accum2 compiled
if [[ -n ${ALOHA_ROOT:-} ]]; then
    read -ra flags <<<"${ALOHA_FLAGS:-}"
    steps=${ALOHA_STEPS:-2000}
    stage train "${ALOHA_LIMIT:-1800}" "$python" train.py --dataset.root "$ALOHA_ROOT" --compile --mixed-precision bf16 \
        --steps "$steps" --eval-freq "$steps" --eval.env aloha-transfer-cube --output-dir "$out/run" "${flags[@]}"
fi

echo
echo "==== summary, $((SECONDS - begin)) s ===="
cat "$out/summary.txt"
tail -n 3 "$out/tests.log"
sed -n '/^command/,$p' "$out/speed.log"
grep -v '^ *$' "$out/equality.log" | tail -n 12
[[ -f $out/run/metrics.jsonl ]] && tail -n 2 "$out/run/metrics.jsonl"
echo "logs and tables: $out"
exit $failed
