#!/usr/bin/env bash
# GRPO without any of DAPO's techniques, table 1's first row: Qwen2.5-32B, 16 nodes of 8 GPUs (arXiv:2503.14476).
# The hyper-parameters are the paper's. Table 1 does not state whether its naive GRPO has a KL term; this one has none.
# RAY_ADDRESS names the Ray cluster of its 16 nodes; train.sh tells how to make one.
#
#   bash recipes/dapo/run_qwen2.5_32b_grpo.sh [key=value ...]     DRY_RUN=1 only checks the configuration
set -euo pipefail

exec bash "$(dirname "${BASH_SOURCE[0]}")/train.sh" 32b qwen2.5_32b_grpo preset=paper \
    actor_rollout_ref.actor.clip_ratio_high=0.2 \
    algorithm.filter_groups.enable=False \
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \
    reward_model.overlong_buffer.enable=False \
    -- "$@"
