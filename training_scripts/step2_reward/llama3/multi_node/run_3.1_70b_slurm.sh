#!/usr/bin/env bash
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
# Step 2, reward model: Llama-3.1-70B on several machines, by Slurm.
#
# Ours: DeepSpeed-Chat has no such script. The shape of its scripts, hyper-parameters not tuned.
# Hardware: eight machines of eight GPUs of 80 GB.
# Memory: 25.6 of 80 GiB on each GPU at the peak, as planned by tools.plan.
# Time: not measured by us.
#
# Submit it from the repository root:
#   sbatch training_scripts/step2_reward/llama3/multi_node/run_3.1_70b_slurm.sh
# The repository, the environment and OUTPUT_DIR are on a file system that all machines share.
#
# The variables below can be set from outside; flags of step2_reward/main.py may follow and win over those below.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?submit this script by sbatch from the repository root}" # Slurm runs a copy of this file

NUM_GPUS=${NUM_GPUS:-8} # on each machine
MASTER_PORT=${MASTER_PORT:-29500}
MODEL=${MODEL:-meta-llama/Llama-3.1-70B}
OUTPUT_DIR=${OUTPUT_DIR:-output/step2_reward/llama3/multi_node/run_3.1_70b}

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p) # reads all: a closed pipe would end this script

mkdir -p "$OUTPUT_DIR"
srun torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc_per_node "$NUM_GPUS" \
    --rdzv_backend c10d --rdzv_endpoint "$MASTER_ADDR:$MASTER_PORT" step2_reward/main.py \
    --model_name_or_path "$MODEL" \
    --data_path \
        Dahoas/rm-static \
        Dahoas/full-hh-rlhf \
        Dahoas/synthetic-instruct-gptj-pairwise \
        yitingxie/rlhf-reward-datasets \
    --data_split 2,4,4 \
    --per_device_train_batch_size 2 \
    --per_device_eval_batch_size 2 \
    --max_seq_len 512 \
    --learning_rate 1e-5 \
    --weight_decay 0.1 \
    --num_train_epochs 1 \
    --gradient_accumulation_steps 1 \
    --lr_scheduler_type cosine \
    --num_warmup_steps 0 \
    --gradient_checkpointing \
    --zero_stage 3 \
    --output_dir "$OUTPUT_DIR" \
    "$@" 2>&1 | tee -ai "$OUTPUT_DIR/train.log"
