#!/usr/bin/env bash
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
# One step for one model on one kind of machine, with the settings in models.txt (for a model that is not listed, the
# defaults of the machine).
#
#   bash training_scripts/run.sh sft Qwen/Qwen2.5-0.5B single_gpu [FLAGS]
#   bash training_scripts/run.sh reward Qwen/Qwen2.5-0.5B single_gpu            # or dpo
#   bash training_scripts/run.sh ppo Qwen/Qwen2.5-0.5B single_gpu               # from the exports of the two
#   sbatch --nodes=8 training_scripts/run.sh ppo meta-llama/Llama-3.1-70B multi_node
#   LAUNCHER=torchrun NUM_NODES=8 NODE_RANK=0 MASTER_ADDR=node1 bash training_scripts/run.sh ...   # on each machine
#
# Variables: NUM_GPUS per machine, HOSTFILE, ACTOR_MODEL, CRITIC_MODEL, OUTPUT_DIR (for several machines on a shared file
# system), LAUNCHER (deepspeed, torchrun, slurm), NO_PLAN=1 (no memory plan: start even if the step would not fit). Flags
# of the program may follow and override the table's; with --auto the table's flags of memory and speed are left out.
set -euo pipefail
if [[ $# -lt 3 ]]; then
    sed -n '/^# One step/,/^set -euo/{/^#/p}' "$0" | cut -c3- >&2
    exit 2
fi
if [[ -n "${SLURM_JOB_NODELIST:-}" ]]; then
    LAUNCHER=${LAUNCHER:-slurm}
    cd "${SLURM_SUBMIT_DIR:?submit this script by sbatch from the repository root}" # Slurm runs a copy of this file
else
    LAUNCHER=${LAUNCHER:-deepspeed}
    cd "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/.." # the repository root
fi

step=$1 model=$2 machine=$3
shift 3
flags=$(python training_scripts/launch_table.py "$step" "$model" "$machine" "$@")
mapfile -t flags <<<"$flags"
case $step in sft) folder=step1_sft ;; reward | dpo) folder=step2_reward ;; ppo) folder=step3_ppo ;; esac
name=$(basename "$model")
case $step in dpo) place=${machine}_dpo ;; *) place=$machine ;; esac
OUTPUT_DIR=${OUTPUT_DIR:-output/$folder/$name/$place}
if [[ "$step" == ppo ]]; then
    models=(--actor_model_name_or_path "${ACTOR_MODEL:-output/step1_sft/$name/$machine/export}"
        --critic_model_name_or_path "${CRITIC_MODEL:-output/step2_reward/$name/$machine/export}")
else
    models=(--model_name_or_path "$model")
fi

NUM_GPUS=${NUM_GPUS:-$([[ "$machine" == single_gpu ]] && echo 1 || echo 8)} # per machine
HOSTFILE=${HOSTFILE:-hostfile}
num_nodes=1
MASTER_PORT=${MASTER_PORT:-29500}
log=$OUTPUT_DIR/train.log
case $LAUNCHER in
deepspeed)
    launch=(deepspeed --num_gpus "$NUM_GPUS")
    if [[ "$machine" == multi_node ]]; then
        # Without the file the launcher would silently use only this machine.
        if [[ ! -f "$HOSTFILE" ]]; then
            echo "HOSTFILE=$HOSTFILE: no such file; write one line 'hostname slots=8' for each machine" >&2
            exit 2
        fi
        launch+=(--hostfile "$HOSTFILE")
        num_nodes=$(grep -c '^[^#]*slots=' "$HOSTFILE" || true)
    fi
    ;;
torchrun)
    launch=(torchrun --nnodes "${NUM_NODES:?the number of machines}" --nproc_per_node "$NUM_GPUS"
        --node_rank "${NODE_RANK:?0 on the first machine, 1 on the next ...}"
        --master_addr "${MASTER_ADDR:?the name of the first machine}" --master_port "$MASTER_PORT")
    num_nodes=$NUM_NODES
    log=$OUTPUT_DIR/train-$NODE_RANK.log
    ;;
slurm)
    first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p) # reads all: a closed pipe would end this script
    num_nodes=$SLURM_JOB_NUM_NODES
    launch=(srun torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc_per_node "$NUM_GPUS"
        --rdzv_backend c10d --rdzv_endpoint "$first:$MASTER_PORT")
    ;;
*)
    echo "LAUNCHER=$LAUNCHER must be deepspeed, torchrun or slurm" >&2
    exit 2
    ;;
esac

mkdir -p "$OUTPUT_DIR"
words=("${models[@]}" "${flags[@]}" --output_dir "$OUTPUT_DIR" "$@")
if [[ -z "${NO_PLAN:-}" && " $* " != *" --auto "* ]] && { type -P nvidia-smi || type -P rocm-smi; } >/dev/null; then
    code=0
    python -m tools.plan --gpu here --num_gpus "$NUM_GPUS" --num_nodes "$num_nodes" --stage "${folder:4:1}" "${words[@]}" \
        2>&1 | tee -ai "$log" || code=$?
    case $code in 2 | 130) exit "$code" ;; esac # any other code: no plan
    export NO_PLAN=1                            # no second plan in the program
fi
"${launch[@]}" "$folder/main.py" "${words[@]}" 2>&1 | tee -ai "$log"
