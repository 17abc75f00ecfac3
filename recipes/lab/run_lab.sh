#!/usr/bin/env bash
# GRPO on sums with a calculator: the tool agent of core with a tiny model, a few minutes on two CPU cores.
#
#   bash recipes/lab/run_lab.sh [key=value ...]          DRY_RUN=1 only checks the configuration
#
# Makes the data and the base model (outputs/lab/sums/ in the current folder) where they are missing.
# Hyper-parameters: recipes/grpo/config/preset/lab_tools.yaml. Output: outputs/grpo/ in the current folder.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
python="$root/.venv/bin/python"
[[ -x "$python" ]] || python=python3
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
tools=actor_rollout_ref.rollout.multi_turn.tool_config_path="$root/recipes/lab/tools.yaml"
arguments=(preset=lab_tools "$tools" -- "$@")

case "${DRY_RUN:-}" in
"" | 0 | false | no) ;;
*) exec "$python" -m recipes.grpo.main_grpo "${arguments[@]}" ;;
esac
DRY_RUN=1 "$python" -m recipes.grpo.main_grpo "${arguments[@]}" > /dev/null # a wrong key ends here, not after a minute
"$python" -m recipes.lab.sums
"$python" -m recipes.grpo.main_grpo "${arguments[@]}"
"$python" -m recipes.lab.report grpo "${arguments[@]}"
