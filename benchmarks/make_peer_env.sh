#!/usr/bin/env bash
# Makes an environment of a peer, outside the repository, for the benchmarks that take --trl_python:
#
#   bash benchmarks/make_peer_env.sh trl-1.16 DIR    SFT, reward model, DPO, GRPO, memory
#   bash benchmarks/make_peer_env.sh trl-1.12 DIR    PPO: the last release with a PPOTrainer
#
# Then: --trl_python DIR/bin/python. torch, transformers, datasets and accelerate are the versions of
# requirements.txt, so that a ratio compares trainers, not libraries. Two minutes and 1.5 GB each where torch
# comes as a CPU build.
#
# PYTHON=python3.12     the interpreter that makes it (3.11 or newer)

set -euo pipefail

if [[ $# -ne 2 ]]; then
    echo "usage: bash benchmarks/make_peer_env.sh trl-1.16|trl-1.12 DIR" >&2
    exit 2
fi
case "$1" in
    trl-1.16) TRL_VERSION=1.16.0 ;;
    trl-1.12) TRL_VERSION=1.12.0 ;;
    *)
        echo "make_peer_env.sh: no peer $1; one of: trl-1.16 trl-1.12" >&2
        exit 2
        ;;
esac
DIR=$2

if [[ ! -x "$DIR/bin/python" ]]; then
    "${PYTHON:-python3}" -m venv "$DIR"
fi
"$DIR/bin/python" -m pip install \
    "torch==2.13.0" \
    "trl==$TRL_VERSION" \
    "transformers~=5.23.0" \
    "datasets~=5.2" \
    "accelerate~=1.15"
"$DIR/bin/python" -c 'import torch, transformers, trl
print(f"trl {trl.__version__}, transformers {transformers.__version__}, torch {torch.__version__}")'
echo "ready: --trl_python $DIR/bin/python"
