#!/usr/bin/env bash
# GRPO with SmolLM2-135M-Instruct on checkable instructions (recipes/real/README.md): 60 steps of 16 prompts with 8
# answers, about 20 minutes on two CPU cores, after the fine-tuning of recipes/sft/run_smollm2_135m.sh.
#
#   bash recipes/grpo/run_smollm2_135m.sh [naive] [key=value ...]          DRY_RUN=1 only checks the configuration
#
# naive rewards constraints alone and has no KL loss: the policy learns to repeat the requested words, and the run warns
# of it (trainer.health). The hyper-parameters are in config/preset/smollm2_135m.yaml; what is missing of model, data and
# fine-tuned model is made in outputs/ of the current folder. The run goes to outputs/grpo/.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
python="$root/.venv/bin/python"
[[ -x "$python" ]] || python=python3
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-20000}" # OpenMP threads that spin longer block each other beside another process
preset=smollm2_135m
if [[ "${1:-}" == naive ]]; then
    preset=smollm2_135m_naive
    shift
fi
train=("$python" -m recipes.grpo.main_grpo "preset=$preset" -- "$@")

case "${DRY_RUN:-}" in
"" | 0 | false | no) ;;
*) exec "${train[@]}" ;;
esac
DRY_RUN=1 "${train[@]}" > /dev/null # reports a wrong key now, not after minutes
bash "$root/recipes/real/start.sh" sft
exec "${train[@]}"
