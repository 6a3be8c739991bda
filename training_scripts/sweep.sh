#!/usr/bin/env bash
# Runs a sweep: one point after the other, each a short run of a script in a sweep/ folder, then prints a table.
#
#   bash training_scripts/sweep.sh training_scripts/step3_ppo/opt/single_node/sweep/run_single.sh
#   ZERO_STAGES="2 3" OFFLOADS=none LORA_DIMS=0 bash training_scripts/sweep.sh SCRIPT --max_train_steps 20
#
# A failed point is listed with its exit code and the sweep continues; a finished point is not run again. Arguments
# after the script's name are passed to its program. The table is also written to $SWEEP_DIR/sweep.tsv.
set -euo pipefail
cd "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/.." # the repository root

if [[ $# -eq 0 || ! -f "$1" ]]; then
    echo "sweep.sh: ${1:-nothing}: no such script; name one, such as" >&2
    find training_scripts -path '*/sweep/run_*.sh' | sort | sed 's/^/  /' >&2
    exit 2
fi
SCRIPT=$1
shift
ZERO_STAGES=${ZERO_STAGES:-0 1 2 3}
OFFLOADS=${OFFLOADS:-none all}
LORA_DIMS=${LORA_DIMS:-0 128}
name=${SCRIPT#*training_scripts/}
SWEEP_DIR=${SWEEP_DIR:-output/${name%.sh}_sweep}
grep -q LORA_DIM "$SCRIPT" || LORA_DIMS=0

mkdir -p "$SWEEP_DIR"
table=$SWEEP_DIR/sweep.tsv
printf 'ZeRO\toffload\tLoRA\texit code\tsteps\tseconds a step\tpeak GiB\n' >"$table"
num_failed=0
for ZERO_STAGE in $ZERO_STAGES; do
    for OFFLOAD in $OFFLOADS; do
        for LORA_DIM in $LORA_DIMS; do
            # Stage 0 cannot offload: such a point would only report that.
            [[ "$ZERO_STAGE" == 0 && "$OFFLOAD" != none ]] && continue
            OUTPUT_DIR=$SWEEP_DIR/zero${ZERO_STAGE}_offload-${OFFLOAD}_lora${LORA_DIM}
            export ZERO_STAGE OFFLOAD LORA_DIM OUTPUT_DIR
            echo "---- $OUTPUT_DIR"
            code=0
            bash "$SCRIPT" "$@" || code=$?
            [[ "$code" -eq 0 ]] || num_failed=$((num_failed + 1))
            # Steps, median seconds and peak memory, from the metrics that the point has written.
            figures=$(python3 - "$OUTPUT_DIR/metrics.jsonl" <<'PYTHON'
import json, pathlib, statistics, sys

file = pathlib.Path(sys.argv[1])
rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
seconds = [row["perf/step_seconds"] for row in rows if "perf/step_seconds" in row]
peaks = [row["perf/peak_memory_gib"] for row in rows if "perf/peak_memory_gib" in row]
print(len(seconds), f"{statistics.median(seconds):.2f}" if seconds else "-", f"{max(peaks):.1f}" if peaks else "-", sep="\t")
PYTHON
            )
            printf '%s\t%s\t%s\t%s\t%s\n' "$ZERO_STAGE" "$OFFLOAD" "$LORA_DIM" "$code" "$figures" >>"$table"
        done
    done
done

column -t -s "$(printf '\t')" "$table" 2>/dev/null || cat "$table"
if [[ "$num_failed" -gt 0 ]]; then
    echo "sweep.sh: $num_failed points failed; each has its train.log" >&2
    exit 1
fi
