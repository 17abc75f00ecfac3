#!/usr/bin/env bash
# The hops task with a tiny model and a score of two parts: a few minutes on two CPU cores (recipes/lab/README.md).
#
#   bash recipes/gdpo/run_lab.sh [key=value ...]          DRY_RUN=1 only checks the configuration
set -euo pipefail

exec bash "$(dirname "${BASH_SOURCE[0]}")/../lab/train_hops.sh" gdpo \
    custom_reward_function.path=recipes.gdpo.functions 'reward_weights={acc: 1.0, chain: 0.5}' "$@"
