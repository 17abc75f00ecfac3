#!/usr/bin/env bash
# Search-R1 (arXiv:2503.09516) with GRPO on Qwen2.5-7B instruct, 1 node of 8 GPUs; train.sh holds the settings.
#
#   bash recipes/search_r1/run_qwen2.5_7b_instruct_grpo.sh [key=value ...]     DRY_RUN=1 only checks the configuration
set -euo pipefail

exec bash "$(dirname "${BASH_SOURCE[0]}")/train.sh" 7b instruct grpo "$@"
