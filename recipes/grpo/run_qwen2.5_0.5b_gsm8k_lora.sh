#!/usr/bin/env bash
# GRPO with LoRA (rank 32) on GSM8K: Qwen2.5-0.5B-Instruct, one GPU.
# The hyper-parameters are those of verl v0.6.1, examples/tuning/0.5b/qwen2-0.5b_grpo-lora_1_h100_fsdp_vllm.sh. Its
# baseline (docs/algo/baseline.md) is 54.3, but its log is of batches of 64 on two GPUs. The script, and so this one,
# has batches of 116 and reproduces no published number.
#
#   bash recipes/grpo/run_qwen2.5_0.5b_gsm8k_lora.sh [key=value ...]     DRY_RUN=1 only checks the configuration
#
# python -m data_preprocess.gsm8k makes the data; GSM8K_DIR names its folder. The output goes to outputs/grpo/ in the
# current folder.
# It needs peft: pip install '.[ray,lora]'.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/../env.sh"
data="${GSM8K_DIR:-$HOME/data/gsm8k}"

# What stands before -- is this script's; the arguments after it win. preset=script holds the rest of the objective.
exec "$python" -m recipes.grpo.main_grpo \
    preset=script \
    data.train_files="$data/train.parquet" \
    data.val_files="$data/test.parquet" \
    data.train_batch_size=116 \
    data.shuffle=False \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct \
    actor_rollout_ref.model.lora_rank=32 \
    actor_rollout_ref.model.lora_alpha=32 \
    actor_rollout_ref.model.target_modules=all-linear \
    actor_rollout_ref.actor.optim.lr=3e-5 \
    actor_rollout_ref.actor.ppo_mini_batch_size=116 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.entropy_coeff=0.001 \
    actor_rollout_ref.actor.fsdp_config.param_offload=True \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \
    actor_rollout_ref.rollout.max_num_seqs=512 \
    trainer.backend=ray \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=1 \
    trainer.total_epochs=1 \
    trainer.experiment_name="qwen2.5_0.5b_gsm8k_lora-seed\${trainer.seed}" \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    -- "$@"
