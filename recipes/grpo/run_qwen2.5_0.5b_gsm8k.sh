#!/usr/bin/env bash
# GRPO on GSM8K: Qwen2.5-0.5B-Instruct, one GPU.
# The objective is that of verl v0.6.1, examples/grpo_trainer/run_qwen2-7b.sh. Batch sizes and lengths are those of
# verl's published PPO run of this model (docs/algo/ppo.md). No published run has exactly this setting.
#
#   bash recipes/grpo/run_qwen2.5_0.5b_gsm8k.sh [key=value ...]          DRY_RUN=1 only checks the configuration
#
# python -m data_preprocess.gsm8k makes the data; GSM8K_DIR names its folder. The output goes to outputs/grpo/ in the
# current folder.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/../env.sh"
data="${GSM8K_DIR:-$HOME/data/gsm8k}"

# What stands before -- is this script's; the arguments after it win. preset=script holds the objective.
exec "$python" -m recipes.grpo.main_grpo \
    preset=script \
    data.train_files="$data/train.parquet" \
    data.val_files="$data/test.parquet" \
    data.train_batch_size=256 \
    data.max_prompt_length=1024 \
    data.max_response_length=512 \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \
    trainer.backend=ray \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=1 \
    trainer.experiment_name="qwen2.5_0.5b_gsm8k-seed\${trainer.seed}" \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    -- "$@"
