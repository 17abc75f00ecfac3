#!/usr/bin/env bash
# GRPO on Geometry3K, questions about figures: Qwen2.5-VL-7B-Instruct, one node of 8 GPUs.
# The hyper-parameters are those of verl v0.6.1, examples/grpo_trainer/run_qwen2_5_vl-7b.sh. A pass has 8
# trajectories where verl has 10, and an engine is one GPU where verl's are two: memory settings.
#
#   bash recipes/grpo/run_qwen2.5_vl_7b_geo3k.sh [key=value ...]         DRY_RUN=1 only checks the configuration
#
# python -m data_preprocess.geo3k makes the data; GEO3K_DIR names its folder. The output goes to outputs/grpo/ in the
# current folder.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/../env.sh"
data="${GEO3K_DIR:-$HOME/data/geo3k}"

# Arguments before -- are this script's; those after it win. preset=script holds what it shares with GSM8K's.
exec "$python" -m recipes.grpo.main_grpo \
    preset=script \
    data.train_files="$data/train.parquet" \
    data.val_files="$data/test.parquet" \
    data.image_key=images \
    data.train_batch_size=512 \
    data.max_prompt_length=1024 \
    data.max_response_length=2048 \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-7B-Instruct \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.kl_loss_coef=0.01 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.rollout.enable_chunked_prefill=False \
    actor_rollout_ref.ref.fsdp_config.param_offload=True \
    trainer.backend=ray \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=8 \
    trainer.experiment_name="qwen2.5_vl_7b_geo3k-seed\${trainer.seed}" \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    -- "$@"
