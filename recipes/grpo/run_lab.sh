#!/usr/bin/env bash
# GRPO on the hops task with a tiny model: a few minutes on two CPU cores (recipes/lab/README.md).
#
#   bash recipes/grpo/run_lab.sh [key=value ...]          DRY_RUN=1 only checks the configuration
#
# The hyper-parameters are in config/preset/lab.yaml; recipes/lab/train_hops.sh does the work. The output goes to
# outputs/grpo/ in the current folder.
set -euo pipefail

exec bash "$(dirname "${BASH_SOURCE[0]}")/../lab/train_hops.sh" grpo "$@"
