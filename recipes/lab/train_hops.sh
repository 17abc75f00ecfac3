#!/usr/bin/env bash
# The hops task with the lab preset of a recipe; the run_lab.sh of ppo, grpo and dapo call this script.
#
#   bash recipes/lab/train_hops.sh RECIPE [key=value ...]          DRY_RUN=1 only checks the configuration
#
# It makes the data and the base model (outputs/lab/ in the current folder) where they are missing. It runs over Ray or,
# where Ray cannot be imported, in one process (trainer.backend=local); the numbers agree up to rounding.
set -euo pipefail

recipe="$1"
shift
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
python="$root/.venv/bin/python"
[[ -x "$python" ]] || python=python3
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
train=("$python" -m "recipes.$recipe.main_$recipe")
arguments=(preset=lab trainer.backend=ray -- "$@")

case "${DRY_RUN:-}" in
"" | 0 | false | no) ;;
*) exec "${train[@]}" "${arguments[@]}" ;;
esac
case " $* " in
*" --help "*) exec "${train[@]}" "${arguments[@]}" ;; # it needs neither data nor model
esac
DRY_RUN=1 "${train[@]}" "${arguments[@]}" > /dev/null # reports a wrong key now, not after a minute
if [[ " $* " != *" trainer.backend="* ]] && ! "$python" -c "import ray" 2> /dev/null; then
    echo "ray cannot be imported: the run is in one process, trainer.backend=local" >&2
    arguments=(preset=lab trainer.backend=local -- "$@")
fi
"$python" -m recipes.lab.prepare
"${train[@]}" "${arguments[@]}"
"$python" -m recipes.lab.report "$recipe" "${arguments[@]}"
