#!/usr/bin/env bash
# Sets up the environment and runs the tests; arguments go to pytest.
#   bash tests/run.sh                         the fast tests, and the smoke tests (a few whole programs)
#   bash tests/run.sh --all                   everything, as the CI does: 25 to 70 minutes on 2 CPU cores
#   bash tests/run.sh -m "not slow"           only the fast tests
#   bash tests/run.sh --gpu                   the GPU tests, in 10 minutes; figures go to gpu_figures.json
#   bash tests/run.sh -n 0 -k ranking         tests that match a name, in one process (--pdb needs that)
set -euo pipefail
cd "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/.."

# shellcheck source=training_scripts/setup_env.sh
source training_scripts/setup_env.sh requirements-dev.txt

export OMP_NUM_THREADS=1 # several ranks share the cores; more threads slow small models down
export HF_HUB_OFFLINE=1  # no test needs the hub, and an accidental request fails at once
if [[ "${1:-}" == --gpu ]]; then
    shift
    python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
        echo "tests/run.sh --gpu: torch sees no CUDA device here; python -m tools.doctor says why" >&2
        exit 2
    }
    exec python -m pytest tests/gpu -n 0 "$@" # one GPU, one test at a time
fi
if [[ $# == 0 ]]; then set -- -m "not slow or smoke"; fi
if [[ $1 == --all ]]; then shift; fi
# Several test files at a time, each in one process; -n 0 runs all tests in this process. In the order of their
# names programs come before the short unit tests: else xdist would begin those with few and long tests last.
exec python -m pytest tests -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder "$@"
