#!/usr/bin/env bash
# Makes an environment of a peer, outside the repository: for the benchmarks that take --trl_python, and for
# tests/judges/test_judges.py, which asks other programs what they read in our exports.
#
#   bash benchmarks/make_peer_env.sh trl-1.16 DIR             SFT, reward model, DPO, GRPO, memory; a judge
#   bash benchmarks/make_peer_env.sh trl-1.12 DIR             PPO: the last release with a PPOTrainer
#   bash benchmarks/make_peer_env.sh transformers-4.57 DIR    a judge, with PEFT, and so the others:
#   bash benchmarks/make_peer_env.sh transformers-5.24 DIR
#   bash benchmarks/make_peer_env.sh lm-eval DIR              lm-evaluation-harness
#   bash benchmarks/make_peer_env.sh ctranslate2 DIR
#   bash benchmarks/make_peer_env.sh llama.cpp DIR            compiled, ten minutes; its converter: DIR/llama.cpp
#
# Then: --trl_python DIR/bin/python. Judges are found by name: give each the folder PEERS/NAME, and the test
# TRIPTYCH_PEERS=PEERS. torch and, unless the peer is a version of it, transformers, datasets and accelerate
# are the versions of requirements.txt, so that a ratio compares trainers, not libraries. Two minutes and
# 1.5 GB each where torch comes as a CPU build.
#
# PYTHON=python3.12     the interpreter that makes it (3.11 or newer)

set -euo pipefail

PEERS="trl-1.16|trl-1.12|transformers-4.57|transformers-5.24|lm-eval|ctranslate2|llama.cpp"
if [[ $# -ne 2 ]]; then
    echo "usage: bash benchmarks/make_peer_env.sh $PEERS DIR" >&2
    exit 2
fi
TRANSFORMERS="transformers~=5.24.0"
TRAINERS=("datasets~=5.2" "accelerate~=1.15" "peft~=0.21.2" "pillow~=12.0")
SERVED=("openai~=3.54" "fastapi~=0.165.0" "pydantic~=2.14" "uvicorn~=0.54.0")
case "$1" in
    trl-1.16) PACKAGES=("trl==1.16.0" "${TRAINERS[@]}") ;;
    trl-1.12) PACKAGES=("trl==1.12.0" "${TRAINERS[@]}") ;;
    transformers-*)
        TRANSFORMERS="transformers~=${1#transformers-}.0"
        PACKAGES=("accelerate~=1.15" "peft~=0.21.2" "pillow~=12.0" "${SERVED[@]}")
        ;;
    lm-eval) PACKAGES=("lm-eval==0.4.13" "accelerate~=1.15" "peft~=0.21.2") ;;
    ctranslate2) PACKAGES=("ctranslate2==4.8.5") ;;
    llama.cpp) PACKAGES=("llama-cpp-python==0.3.36" "gguf==0.19.0" "sentencepiece~=0.2") ;;
    *)
        echo "make_peer_env.sh: no peer $1; one of: ${PEERS//|/ }" >&2
        exit 2
        ;;
esac
DIR=$2

if [[ ! -x "$DIR/bin/python" ]]; then
    "${PYTHON:-python3}" -m venv "$DIR"
fi
"$DIR/bin/python" -m pip install "torch==2.13.0" "$TRANSFORMERS" "${PACKAGES[@]}"
if [[ $1 == llama.cpp && ! -d "$DIR/llama.cpp" ]]; then # the source package has llama.cpp's own converter
    "$DIR/bin/python" -m pip download --no-deps --no-binary :all: -d "$DIR/source" "${PACKAGES[0]}"
    tar -xzf "$DIR/source/"*.tar.gz -C "$DIR/source" --wildcards "*/vendor/llama.cpp/*.py"
    mv "$DIR/source/"*/vendor/llama.cpp "$DIR/llama.cpp"
    rm -r "$DIR/source"
fi
"$DIR/bin/python" -c 'import sys
from importlib.metadata import version
names = [package.split("=")[0].rstrip("~") for package in sys.argv[1:]]
print(", ".join(f"{name} {version(name)}" for name in names))' "torch" "$TRANSFORMERS" "${PACKAGES[@]}"
echo "ready: --trl_python $DIR/bin/python"
