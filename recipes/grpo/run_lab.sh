#!/usr/bin/env bash
# GRPO on the hops task with a tiny model: a few minutes on two CPU cores. recipes/lab/README.md says what it shows.
#
#   bash recipes/grpo/run_lab.sh [key=value ...]          DRY_RUN=1 only checks the configuration
#
# Hyper-parameters: config/preset/lab.yaml. Output: outputs/grpo/ in the current folder. recipes/lab/train_hops.sh runs it.
set -euo pipefail

exec bash "$(dirname "${BASH_SOURCE[0]}")/../lab/train_hops.sh" grpo "$@"
