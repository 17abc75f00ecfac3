#!/usr/bin/env bash
# Fine-tunes SmolLM2-135M-Instruct on 800 of its own sentences, changed by a program to keep the constraints of their
# prompts (recipes/real/README.md): about five minutes on two CPU cores, the model's answers included.
#
#   bash recipes/sft/run_smollm2_135m.sh [key=value ...]          DRY_RUN=1 only checks the configuration
#
# The hyper-parameters are in config/preset/smollm2_135m.yaml; model and demonstrations are made in outputs/real/ of the
# current folder where they are missing. The run goes to outputs/sft/.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
python="$root/.venv/bin/python"
[[ -x "$python" ]] || python=python3
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-20000}" # OpenMP threads that spin longer block each other beside another process
train=("$python" -m recipes.sft.main_sft preset=smollm2_135m -- "$@")

case "${DRY_RUN:-}" in
"" | 0 | false | no) ;;
*) exec "${train[@]}" ;;
esac
DRY_RUN=1 "${train[@]}" > /dev/null # reports a wrong key now, not after minutes
bash "$root/recipes/real/start.sh" demonstrations
exec "${train[@]}"
