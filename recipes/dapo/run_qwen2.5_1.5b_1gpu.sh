#!/usr/bin/env bash
# DAPO with all its techniques at a small size: Qwen2.5-1.5B, one GPU, answers of 4k tokens (arXiv:2503.14476).
# The objective is that of verl-recipe, dapo/run_dapo_qwen2.5_32b.sh. The batch is smaller. No published run has this
# setting.
#
#   bash recipes/dapo/run_qwen2.5_1.5b_1gpu.sh [key=value ...]     DRY_RUN=1 only checks the configuration
set -euo pipefail

exec bash "$(dirname "${BASH_SOURCE[0]}")/train.sh" 1.5b qwen2.5_1.5b_1gpu preset=script \
    data.train_batch_size=64 \
    data.gen_batch_size=192 \
    data.max_response_length=4096 \
    reward_model.overlong_buffer.len=1024 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    -- "$@"
