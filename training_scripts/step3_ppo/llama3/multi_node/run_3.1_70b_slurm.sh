#!/usr/bin/env bash
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
# Step 3, PPO: Llama-3.1-70B actor and critic on several machines, by Slurm.
#
# Ours: DeepSpeed-Chat has no such script. The shape of its scripts, hyper-parameters not tuned.
# Hardware: eight machines of eight GPUs of 80 GB.
# Memory: 54.8 of 80 GiB on each GPU at the peak, 33 GiB of each machine's CPU, as planned by tools.plan.
# Time: not measured by us.
#
# Submit it from the repository root:
#   sbatch training_scripts/step3_ppo/llama3/multi_node/run_3.1_70b_slurm.sh
# The repository, the environment and OUTPUT_DIR are on a file system that all machines share.
#
# The variables below can be set from outside; flags of step3_ppo/main.py may follow and win over those below.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?submit this script by sbatch from the repository root}" # Slurm runs a copy of this file

NUM_GPUS=${NUM_GPUS:-8} # on each machine
MASTER_PORT=${MASTER_PORT:-29500}
ACTOR_MODEL=${ACTOR_MODEL:-output/step1_sft/llama3/multi_node/run_3.1_70b/export}
CRITIC_MODEL=${CRITIC_MODEL:-output/step2_reward/llama3/multi_node/run_3.1_70b/export}
OUTPUT_DIR=${OUTPUT_DIR:-output/step3_ppo/llama3/multi_node/run_3.1_70b}

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p) # reads all: a closed pipe would end this script

mkdir -p "$OUTPUT_DIR"
srun torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc_per_node "$NUM_GPUS" \
    --rdzv_backend c10d --rdzv_endpoint "$MASTER_ADDR:$MASTER_PORT" step3_ppo/main.py \
    --actor_model_name_or_path "$ACTOR_MODEL" \
    --critic_model_name_or_path "$CRITIC_MODEL" \
    --data_path Dahoas/rm-static \
    --data_split 2,4,4 \
    --per_device_generation_batch_size 4 \
    --per_device_training_batch_size 2 \
    --generation_batches 1 \
    --ppo_epochs 1 \
    --max_prompt_seq_len 256 \
    --max_answer_seq_len 256 \
    --actor_learning_rate 5e-7 \
    --critic_learning_rate 5e-6 \
    --num_train_epochs 1 \
    --gradient_accumulation_steps 1 \
    --lr_scheduler_type cosine \
    --num_warmup_steps 100 \
    --actor_gradient_checkpointing \
    --critic_gradient_checkpointing \
    --offload_reference_model \
    --offload_reward_model \
    --actor_zero_stage 3 \
    --critic_zero_stage 3 \
    --enable_hybrid_engine \
    --inference_tp_size 8 \
    --output_dir "$OUTPUT_DIR" \
    "$@" 2>&1 | tee -ai "$OUTPUT_DIR/train.log"
