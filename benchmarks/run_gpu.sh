#!/usr/bin/env bash
# A first day on this machine's GPU: environment, benchmarks, tests. At most 40 minutes after the packages are installed,
# on one card of 24 GB or more. Continues after a failure; FOLDER/run_gpu.json has the exit code, seconds and figures of
# every stage: send it in.
#
#   bash benchmarks/run_gpu.sh [FOLDER]
#
# QUICK=1                                          tiny models, one test: to try the script itself
# TRL_116=DIR/bin/python, TRL_112=DIR/bin/python   environments of make_peer_env.sh: then TRL runs beside us, longer
set -uo pipefail
folder=$(realpath -m "${1:-output/run_gpu}")
cd "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/.." || exit
rm -rf "$folder/stages"
mkdir -p "$folder/stages"
size=(--runs 3) some=()
if [[ -n "${QUICK:-}" ]]; then size=(--quick) some=(-k graphs_stay); fi
failed=()

# stage NAME SECONDS COMMAND...: keeps log, exit code and seconds; SECONDS is the limit
stage() {
    local name=$1 limit=$2 begun=$SECONDS code=0
    shift 2
    echo "== $name: $*"
    timeout --kill-after 20 "$limit" "$@" 2>&1 | tee "$folder/stages/$name.log" || code=${PIPESTATUS[0]}
    echo "$code $((SECONDS - begun))" >"$folder/stages/$name.code"
    ((code == 0)) || failed+=("$name")
}

# shellcheck source=training_scripts/setup_env.sh
source training_scripts/setup_env.sh requirements-dev.txt || echo "run_gpu.sh: continues with the installed packages"
export HF_HUB_OFFLINE=1
python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
    echo "run_gpu.sh: torch sees no CUDA device here; python -m tools.doctor says why" >&2
    exit 2
}
export GPU_FIGURES="$folder/stages/tests.json"
stage doctor 60 python -m tools.doctor
stage gpu 720 python benchmarks/bench_gpu.py "${size[@]}"
stage tests 840 python -m pytest tests/gpu -n 0 -p no:cacheprovider "${some[@]}"
stage generate 540 python benchmarks/bench_generate.py "${size[@]}"
stage reshard 120 python benchmarks/bench_reshard.py ${QUICK:+--quick}
if [[ -n "${TRL_116:-}" ]]; then stage train 1200 python benchmarks/bench_train.py --runs 3 --trl_python "$TRL_116"; fi
if [[ -n "${TRL_112:-}" ]]; then stage ppo_step 600 python benchmarks/bench_ppo_step.py --trl_python "$TRL_112"; fi
python - "$folder" <<'PYTHON'
import json, pathlib, sys

def figures(stage):  # of its file, or a benchmark's last line
    if stage.with_suffix(".json").exists():
        return json.loads(stage.with_suffix(".json").read_text())
    lines = stage.with_suffix(".log").read_text(errors="replace").splitlines()
    return next((json.loads(line) for line in lines[-1:] if line.startswith("{")), None)

folder, stages = pathlib.Path(sys.argv[1]), {}
for file in sorted(folder.glob("stages/*.code"), key=lambda file: file.stat().st_mtime):
    code, seconds = map(int, file.read_text().split())
    stages[file.stem] = {"exit_code": code, "seconds": seconds, "figures": figures(file)}
(folder / "run_gpu.json").write_text(json.dumps({"stages": stages}, indent=1) + "\n")
PYTHON
echo "run_gpu.sh: $folder/run_gpu.json after $((SECONDS / 60)) minutes"
if [[ ${#failed[@]} -gt 0 ]]; then
    echo "run_gpu.sh: failed: ${failed[*]}; their logs are in $folder/stages" >&2
    exit 1
fi
