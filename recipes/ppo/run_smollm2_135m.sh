#!/usr/bin/env bash
# PPO with SmolLM2-135M-Instruct on checkable instructions (recipes/real/README.md), for two CPU cores, after the
# fine-tuning of recipes/sft/run_smollm2_135m.sh: 20 steps, about an hour on two cores without AMX.
#
#   bash recipes/ppo/run_smollm2_135m.sh [key=value ...]          DRY_RUN=1 only checks the configuration
#
# The hyper-parameters are in config/preset/smollm2_135m.yaml; recipes/real/train.sh does the work. The run goes to
# outputs/ppo/.
set -euo pipefail

exec bash "$(dirname "${BASH_SOURCE[0]}")/../real/train.sh" ppo "$@"
