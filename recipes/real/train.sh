#!/usr/bin/env bash
# The instructions task with the smollm2_135m preset of a recipe; the run_smollm2_135m.sh of ppo, grpo and dapo call this
# script.
#
#   bash recipes/real/train.sh RECIPE PRESET [key=value ...]          DRY_RUN=1 only checks the configuration
#
# It makes what is missing of model, data and fine-tuned model in outputs/ of the current folder.
set -euo pipefail

recipe="$1" preset="$2"
shift 2
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
python="$root/.venv/bin/python"
[[ -x "$python" ]] || python=python3
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-20000}" # OpenMP threads that spin longer block each other beside another process
train=("$python" -m "recipes.$recipe.main_$recipe" "preset=$preset" -- "$@")

case "${DRY_RUN:-}" in
"" | 0 | false | no) ;;
*) exec "${train[@]}" ;;
esac
DRY_RUN=1 "${train[@]}" > /dev/null # reports a wrong key now, not after minutes
bash "$root/recipes/real/start.sh" sft
exec "${train[@]}"
