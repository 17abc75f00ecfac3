#!/usr/bin/env bash
# GRPO with a tiny model, a few minutes on two CPU cores: sums with a calculator (tools), guessing what a simulated user
# thinks of (users), a path through a drawn maze (maze), or questions about pictures, with a model of Qwen2.5-VL's shape
# (figures). The control of figures gets the same questions about an empty picture: append trainer.experiment_name=lab-figures-blank
# data.train_files=./outputs/lab/figures/blank_train.parquet data.val_files=./outputs/lab/figures/blank_test.parquet.
#
#   bash recipes/lab/run_lab.sh [tools|users|maze|figures] [key=value ...]          DRY_RUN=1 only checks the configuration
#
# It makes the data and the base model (outputs/lab/ in the current folder) where they are missing.
# It runs over Ray or, where Ray cannot be imported, in one process. Over Ray a run repeats up to rounding; with
# trainer.backend=local appended it repeats to the bit.
# The hyper-parameters are in recipes/grpo/config/preset/lab_tools.yaml, lab_users.yaml, lab_maze.yaml and
# lab_figures.yaml. The output goes to outputs/grpo/ in the current folder.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
case "${1:-}" in
tools | users | maze | figures) kind="$1" && shift ;;
*) kind=tools ;;
esac
turns=actor_rollout_ref.rollout.multi_turn
case "$kind" in
tools) make=(recipes.lab.sums) others=("$turns.tool_config_path=$root/recipes/lab/tools.yaml") ;;
users) make=(recipes.lab.guesses) others=("$turns.interaction_config_path=$root/recipes/lab/users.yaml") ;;
maze) make=(recipes.lab.maze) others=() ;;
figures) make=(recipes.lab.figures --blank) others=() ;;
esac
settle grpo "preset=lab_$kind" ${others[@]+"${others[@]}"} -- "$@"
"$python" -m "${make[@]}"
"${train[@]}" "${arguments[@]}"
"$python" -m recipes.lab.report grpo "${arguments[@]}"
