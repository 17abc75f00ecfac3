#!/usr/bin/env bash
# GRPO on sums with a calculator: the tool agent of core with a tiny model, a few minutes on two CPU cores.
#
#   bash recipes/lab/run_lab.sh [key=value ...]          DRY_RUN=1 only checks the configuration
#
# It makes the data and the base model (outputs/lab/sums/ in the current folder) where they are missing.
# It runs over Ray or, where Ray cannot be imported, in one process. Over Ray a run repeats up to rounding; with
# trainer.backend=local appended it repeats to the bit.
# The hyper-parameters are in recipes/grpo/config/preset/lab_tools.yaml. The output goes to outputs/grpo/ in the current
# folder.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
python="$root/.venv/bin/python"
[[ -x "$python" ]] || python=python3
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
tools=actor_rollout_ref.rollout.multi_turn.tool_config_path="$root/recipes/lab/tools.yaml"
arguments=(preset=lab_tools trainer.backend=ray "$tools" -- "$@")

case "${DRY_RUN:-}" in
"" | 0 | false | no) ;;
*) exec "$python" -m recipes.grpo.main_grpo "${arguments[@]}" ;;
esac
DRY_RUN=1 "$python" -m recipes.grpo.main_grpo "${arguments[@]}" > /dev/null # reports a wrong key now, not after a minute
if ! "$python" -c "import ray" 2> /dev/null; then
    echo "ray cannot be imported: the run is in one process, trainer.backend=local" >&2
    arguments=(preset=lab_tools trainer.backend=local "$tools" -- "$@")
fi
"$python" -m recipes.lab.sums
"$python" -m recipes.grpo.main_grpo "${arguments[@]}"
"$python" -m recipes.lab.report grpo "${arguments[@]}"
