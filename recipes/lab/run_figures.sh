#!/usr/bin/env bash
# GRPO on questions about pictures: a tiny model of Qwen2.5-VL's shape, a few minutes on two CPU cores.
#
#   bash recipes/lab/run_figures.sh [key=value ...]          DRY_RUN=1 only checks the configuration
#
# It makes the data and the base model (outputs/lab/figures/ in the current folder) where they are missing. The control
# gets the same questions about an empty picture: append data.train_files=./outputs/lab/figures/blank_train.parquet
# data.val_files=./outputs/lab/figures/blank_test.parquet trainer.experiment_name=lab-figures-blank.
# It runs over Ray or, where Ray cannot be imported, in one process; with trainer.backend=local appended it repeats to
# the bit. The hyper-parameters are in recipes/grpo/config/preset/lab_figures.yaml.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
python="$root/.venv/bin/python"
[[ -x "$python" ]] || python=python3
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
arguments=(preset=lab_figures trainer.backend=ray -- "$@")

case "${DRY_RUN:-}" in
"" | 0 | false | no) ;;
*) exec "$python" -m recipes.grpo.main_grpo "${arguments[@]}" ;;
esac
if ! "$python" -c "import ray" 2> /dev/null; then
    echo "ray cannot be imported: the run is in one process, trainer.backend=local" >&2
    arguments=(preset=lab_figures trainer.backend=local -- "$@")
fi
"$python" -m recipes.lab.figures --blank
"$python" -m recipes.grpo.main_grpo "${arguments[@]}"
"$python" -m recipes.lab.report grpo "${arguments[@]}"
