#!/usr/bin/env bash
# DAPO before its token-level loss and dynamic sampling: Qwen2.5-32B, 16 nodes of 8 GPUs (arXiv:2503.14476).
# The hyper-parameters are those of verl-recipe, dapo/run_dapo_early_qwen2.5_32b.sh. For the paper's append
# preset=paper trainer.experiment_name=qwen2.5_32b_early_paper.
# RAY_ADDRESS names the Ray cluster of its 16 nodes; train.sh tells how to make one.
#
#   bash recipes/dapo/run_qwen2.5_32b_early.sh [key=value ...]     DRY_RUN=1 only checks the configuration
set -euo pipefail

exec bash "$(dirname "${BASH_SOURCE[0]}")/train.sh" 32b qwen2.5_32b_early preset=script \
    algorithm.filter_groups.enable=False \
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \
    -- "$@"
