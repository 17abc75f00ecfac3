#!/usr/bin/env bash
# Supervised fine-tuning with LoRA (rank 32) on GSM8K's own solutions: Qwen2.5-0.5B-Instruct, one GPU.
# The hyper-parameters are those of verl v0.6.1, examples/sft/gsm8k/run_qwen_05_peft.sh. No result of it was published.
#
#   bash recipes/sft/run_qwen2.5_0.5b_gsm8k_lora.sh [key=value ...]     DRY_RUN=1 only checks the configuration
#
# python -m data_preprocess.gsm8k makes the data; GSM8K_DIR names its folder. The output goes to outputs/sft/ in the
# current folder. It needs peft: pip install '.[ray,lora]'.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/../env.sh"
data="${GSM8K_DIR:-$HOME/data/gsm8k}"

# What stands before -- is this script's; the arguments after it win.
exec "$python" -m recipes.sft.main_sft \
    data.train_files="$data/train.parquet" \
    data.val_files="$data/test.parquet" \
    data.response_key=extra_info.answer \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct \
    actor_rollout_ref.model.lora_rank=32 \
    actor_rollout_ref.model.lora_alpha=16 \
    actor_rollout_ref.model.target_modules=all-linear \
    actor_rollout_ref.actor.optim.lr=1e-4 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \
    trainer.backend=ray \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=1 \
    trainer.total_epochs=1 \
    trainer.experiment_name="qwen2.5_0.5b_gsm8k_lora-seed\${trainer.seed}" \
    trainer.save_freq=29 \
    trainer.test_freq=29 \
    -- "$@"
