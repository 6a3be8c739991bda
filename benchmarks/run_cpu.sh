#!/usr/bin/env bash
# Measures the CPU's baselines again, one after another, each by the command in its file: two hours on two quiet cores.
# Continues after a failure. At the end the files in benchmarks/baselines of the runs that ended well are replaced.
#
#   TRL_116=DIR/bin/python TRL_112=DIR/bin/python bash benchmarks/run_cpu.sh [NAME ...]
#
# NAME                 some of them, such as train.smollm2; without, all
# TRL_116, TRL_112     environments of make_peer_env.sh, for the benchmarks beside TRL
# OUTPUT_DIR           logs and last lines, by default output/run_cpu
# QUICK=1              tiny models: to try the script itself; no file is replaced
set -euo pipefail
cd "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/.."
folder=${OUTPUT_DIR:-output/run_cpu}
baselines=(benchmarks/baselines/*.cpu.json)
if [[ $# -gt 0 ]]; then baselines=("${@/#/benchmarks/baselines/}") && baselines=("${baselines[@]/%/.cpu.json}"); fi
ls "${baselines[@]}" >/dev/null # ends here if there is no such file
mkdir -p "$folder"
rm -f "$folder"/*.cpu.json

# shellcheck source=training_scripts/setup_env.sh
source training_scripts/setup_env.sh requirements-dev.txt
export HF_HUB_OFFLINE=1
unset OMP_NUM_THREADS
failed=()
for baseline in "${baselines[@]}"; do
    name=$(basename "$baseline" .cpu.json)
    command=$(python -c 'import json, sys; print(json.load(open(sys.argv[1]))["command"])' "$baseline")
    trl=${TRL_116:-} version=1.16
    if [[ $name == ppo_step ]]; then trl=${TRL_112:-} version=1.12; fi
    words="${command/--trl_python TRL/${trl:+--trl_python $trl}}${QUICK:+ --quick}"
    echo "== $name: $words"
    begun=$SECONDS
    bash -c "$words" 2>&1 | tee "$folder/$name.log" || {
        failed+=("$name")
        continue
    }
    echo "== $name: $((SECONDS - begun)) seconds"
    # The last line, with the command and the peer's version as in the file.
    python - "$folder/$name.log" "$command" "$version" >"$folder/$name.cpu.json" <<'PYTHON'
import pathlib, sys, json
from benchmarks.bench_evidence import as_json

log, command, version = sys.argv[1:]
facts = json.loads(pathlib.Path(log).read_text().splitlines()[-1]) | {"command": command}
if "TRL" in command:
    facts["versions"] += f"; peer TRL {version}"
print(as_json(facts), end="")
PYTHON
done
# At the end: a changed file would make the commit of the next run dirty.
if [[ -z "${QUICK:-}" ]]; then cp "$folder"/*.cpu.json benchmarks/baselines/; fi
if [[ ${#failed[@]} -gt 0 ]]; then
    echo "run_cpu.sh: failed: ${failed[*]}; their logs are in $folder" >&2
    exit 1
fi
