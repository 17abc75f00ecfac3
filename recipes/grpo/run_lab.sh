#!/usr/bin/env bash
# GRPO on the hops task with a tiny model: a few minutes on two CPU cores. recipes/lab/README.md says what it shows.
#
#   bash recipes/grpo/run_lab.sh [key=value ...]          DRY_RUN=1 only checks the configuration
#
# Makes the data and the base model (outputs/lab/ in the current folder) where they are missing.
# Runs over Ray, or, where Ray cannot be imported, in one process (trainer.backend=local): to the same numbers.
# Hyper-parameters: config/preset/lab.yaml. Output: outputs/grpo/ in the current folder.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
python="$root/.venv/bin/python"
[[ -x "$python" ]] || python=python3
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
arguments=(preset=lab trainer.backend=ray -- "$@")

case "${DRY_RUN:-}" in
"" | 0 | false | no) ;;
*) exec "$python" -m recipes.grpo.main_grpo "${arguments[@]}" ;;
esac
DRY_RUN=1 "$python" -m recipes.grpo.main_grpo "${arguments[@]}" > /dev/null # a wrong key ends here, not after a minute
if ! "$python" -c "import ray" 2> /dev/null; then
    echo "ray cannot be imported: the run is in one process, trainer.backend=local" >&2
    arguments=(preset=lab trainer.backend=local -- "$@")
fi
"$python" -m recipes.lab.prepare
"$python" -m recipes.grpo.main_grpo "${arguments[@]}"
"$python" -m recipes.lab.report grpo "${arguments[@]}"
