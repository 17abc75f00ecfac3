#!/usr/bin/env bash
# On-policy distillation of SmolLM2-135M-Instruct on checkable instructions (recipes/real/README.md), for two CPU cores:
# the student is the fine-tuned model, the teacher what 20 steps of GRPO made of it. The script makes what is missing of
# both, trains 20 steps, and writes a report.
#
#   bash recipes/opd/run_smollm2_135m.sh [key=value ...]          DRY_RUN=1 only checks the configuration
#
# distillation.teacher.path names another teacher. The hyper-parameters are in config/preset/smollm2_135m.yaml;
# recipes/real/train.sh does the work. The run goes to outputs/opd/.
set -euo pipefail

train=(bash "$(dirname "${BASH_SOURCE[0]}")/../real/train.sh" opd "$@")
source "$(dirname "${BASH_SOURCE[0]}")/../real/common.sh"
if is_dry_run ${keys[@]+"${keys[@]}"}; then exec "${train[@]}"; fi
DRY_RUN=1 "${train[@]}" > /dev/null # reports a wrong key now, not after minutes
[[ "$*" == *distillation.teacher.path=* ]] || bash "$root/recipes/opd/real_teacher.sh"
"${train[@]}"
"$python" -m recipes.lab.report opd "preset=$preset" -- ${keys[@]+"${keys[@]}"}
