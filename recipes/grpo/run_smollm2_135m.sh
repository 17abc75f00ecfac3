#!/usr/bin/env bash
# GRPO with SmolLM2-135M-Instruct on a task of recipes/real/README.md, for two CPU cores, after the fine-tuning of
# recipes/sft/run_smollm2_135m.sh. The task is checkable instructions by default: 40 steps of 16 prompts with 8 answers,
# an hour where a step takes 84 s (two cores without AMX).
#
#   bash recipes/grpo/run_smollm2_135m.sh [passages|arithmetic|naive] [random|shuffled] [key=value ...]
#
# naive rewards the constraints of instructions alone and has no KL loss: the policy learns to repeat the requested
# words. random and shuffled are controls: the reward is a coin, or the ground
# truth is another prompt's. The hyper-parameters are in config/preset/smollm2_135m*.yaml; recipes/real/train.sh does the
# work. The run goes to outputs/grpo/. DRY_RUN=1 only checks the configuration.
set -euo pipefail

exec bash "$(dirname "${BASH_SOURCE[0]}")/../real/train.sh" grpo "$@"
