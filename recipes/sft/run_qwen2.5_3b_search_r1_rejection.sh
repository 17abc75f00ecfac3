#!/usr/bin/env bash
# Rejection sampling of Search-R1's episodes (arXiv:2503.09516, table 2) with Qwen2.5-3B-Instruct, 1 node of 8 GPUs.
# search_r1_rejection.sh has the stages and the settings.
#
#   bash recipes/sft/run_qwen2.5_3b_search_r1_rejection.sh [key=value ...]     DRY_RUN=1 only checks the fine-tuning
set -euo pipefail

exec bash "$(dirname "${BASH_SOURCE[0]}")/search_r1_rejection.sh" 3b "$@"
