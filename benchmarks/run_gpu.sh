#!/usr/bin/env bash
# Runs the benchmarks on this machine's GPUs, about 20 minutes on one card of 24 GB or more. The last lines go to
# FOLDER/NAME.gpu.json: send them in, or commit them under benchmarks/baselines/.
#
#   bash benchmarks/run_gpu.sh [FOLDER]
#
# TRL_116=DIR/bin/python, TRL_112=DIR/bin/python    environments of make_peer_env.sh: TRL then runs beside us
set -euo pipefail
folder=$(realpath -m "${1:-output/gpu_benchmarks}")
cd "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/.."
# shellcheck source=training_scripts/setup_env.sh
source training_scripts/setup_env.sh requirements.txt
python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
    echo "run_gpu.sh: torch sees no CUDA device here; python -m tools.doctor says why" >&2
    exit 2
}
mkdir -p "$folder"
failed=()

measure() {
    local name=$1
    shift
    echo "== bench_$name.py $*"
    if python "benchmarks/bench_$name.py" "$@" 2>&1 | tee "$folder/$name.log"; then
        tail -n 1 "$folder/$name.log" >"$folder/$name.gpu.json"
    else
        failed+=("$name")
    fi
}

measure gpu
measure generate --runs 3
measure reshard
if [[ -n "${TRL_116:-}" ]]; then measure train --runs 3 --trl_python "$TRL_116"; fi
if [[ -n "${TRL_112:-}" ]]; then measure ppo_step --trl_python "$TRL_112"; fi
echo "figures: $folder"
if [[ ${#failed[@]} -gt 0 ]]; then
    echo "run_gpu.sh: failed: ${failed[*]}; their logs are in $folder" >&2
    exit 1
fi
