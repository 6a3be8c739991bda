#!/usr/bin/env bash
# Sets the environment up and runs the tests; arguments go to pytest.
#   bash tests/run.sh                         everything
#   bash tests/run.sh -m "not slow"           the fast part
#   bash tests/run.sh -m "not long"         what the CI runs
#   bash tests/run.sh -k ranking              what matches a name
set -euo pipefail
cd "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/.."

# shellcheck source=training_scripts/setup_env.sh
source training_scripts/setup_env.sh requirements-dev.txt

export OMP_NUM_THREADS=1 # several ranks share the cores; more threads slow small models down
export HF_HUB_OFFLINE=1  # no test needs the hub, and a look-up by mistake fails at once
exec python -m pytest tests "$@"
