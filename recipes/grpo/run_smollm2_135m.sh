#!/usr/bin/env bash
# GRPO with SmolLM2-135M-Instruct on checkable instructions (recipes/real/README.md): 60 steps of 16 prompts with 8
# answers, about 20 minutes on two CPU cores, after the fine-tuning of recipes/sft/run_smollm2_135m.sh.
#
#   bash recipes/grpo/run_smollm2_135m.sh [naive] [key=value ...]          DRY_RUN=1 only checks the configuration
#
# naive rewards constraints alone and has no KL loss: the policy learns to repeat the requested words, and the run warns
# of it (trainer.health). The hyper-parameters are in config/preset/smollm2_135m.yaml; recipes/real/train.sh does the
# work. The run goes to outputs/grpo/.
set -euo pipefail

preset=smollm2_135m
if [[ "${1:-}" == naive ]]; then
    preset=smollm2_135m_naive
    shift
fi
exec bash "$(dirname "${BASH_SOURCE[0]}")/../real/train.sh" grpo "$preset" "$@"
