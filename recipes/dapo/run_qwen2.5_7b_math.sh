#!/usr/bin/env bash
# DAPO without dynamic sampling on answers of 8k tokens: Qwen2.5-Math-7B, 8 nodes of 8 GPUs (arXiv:2503.14476).
# The hyper-parameters are those of verl v0.5, recipe/dapo/test_dapo_7b_math.sh. algorithm.filter_groups.enable=True
# turns dynamic sampling on.
# RAY_ADDRESS names the Ray cluster of its 8 nodes; train.sh tells how to make one.
#
#   bash recipes/dapo/run_qwen2.5_7b_math.sh [key=value ...]     DRY_RUN=1 only checks the configuration
set -euo pipefail

exec bash "$(dirname "${BASH_SOURCE[0]}")/train.sh" 7b_math qwen2.5_7b_math preset=script \
    data.max_response_length=8192 \
    algorithm.filter_groups.enable=False \
    trainer.total_training_steps=200 \
    -- "$@"
