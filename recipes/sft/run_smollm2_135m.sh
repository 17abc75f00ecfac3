#!/usr/bin/env bash
# Fine-tunes SmolLM2-135M-Instruct on demonstrations of a task of recipes/real/README.md: about a quarter of an hour on two CPU
# cores without AMX. For instructions, the default, they are 800 of the model's own sentences, changed by a program to keep the
# constraints of their prompts.
#
#   bash recipes/sft/run_smollm2_135m.sh [passages|arithmetic|search] [key=value ...]
#
# The hyper-parameters are in config/preset/smollm2_135m*.yaml; recipes/real/train.sh does the work: model and
# demonstrations are made in outputs/real/ of the current folder where they are missing. The run goes to outputs/sft/.
# DRY_RUN=1 only checks the configuration.
set -euo pipefail

exec bash "$(dirname "${BASH_SOURCE[0]}")/../real/train.sh" sft "$@"
