#!/usr/bin/env bash
# DAPO with all its techniques at a small size: Qwen2.5-1.5B, one GPU, answers of 4k tokens (arXiv:2503.14476).
# The objective is that of verl-recipe, dapo/run_dapo_qwen2.5_32b.sh. The batch is smaller. No published run has this
# setting.
# This script has never run at its scale; it needs trainer.backend=ray and vLLM.
#
#   bash recipes/dapo/run_qwen2.5_1.5b_1gpu.sh [key=value ...]   DRY_RUN=1 only checks the configuration
#
# prepare_dapo_data.sh makes the data; DAPO_DIR names its folder. The output goes to outputs/dapo/ in the current folder.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
data="${DAPO_DIR:-$HOME/data/dapo}"
python="$root/.venv/bin/python"
[[ -x "$python" ]] || python=python3
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

# Arguments before -- are this script's; those after it win. preset=script holds every setting that decides the result.
exec "$python" -m recipes.dapo.main_dapo \
    preset=script \
    data.train_files="$data/dapo_math/train.parquet" \
    data.val_files="$data/aime2024/test.parquet" \
    data.train_batch_size=64 \
    data.gen_batch_size=192 \
    data.max_response_length=4096 \
    reward_model.overlong_buffer.len=1024 \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-1.5B \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    trainer.backend=ray \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=1 \
    trainer.experiment_name=qwen2.5_1.5b_1gpu \
    trainer.test_freq=20 \
    trainer.save_freq=20 \
    -- "$@"
