#!/usr/bin/env bash
# GRPO with overlong filtering and clip-higher, table 1's third row: Qwen2.5-32B, 16 nodes of 8 GPUs (arXiv:2503.14476).
# The hyper-parameters are the paper's.
# RAY_ADDRESS names the Ray cluster of its 16 nodes; train.sh tells how to make one.
#
#   bash recipes/dapo/run_qwen2.5_32b_clip_higher.sh [key=value ...]     DRY_RUN=1 only checks the configuration
set -euo pipefail

exec bash "$(dirname "${BASH_SOURCE[0]}")/train.sh" 32b qwen2.5_32b_clip_higher preset=paper \
    actor_rollout_ref.actor.overlong_filtering=True \
    algorithm.filter_groups.enable=False \
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \
    reward_model.overlong_buffer.enable=False \
    -- "$@"
