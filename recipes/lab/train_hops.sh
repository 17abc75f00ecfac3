#!/usr/bin/env bash
# The hops task with the lab preset of a recipe; the run_lab.sh of most recipes calls this script.
#
#   bash recipes/lab/train_hops.sh RECIPE [key=value ...]          DRY_RUN=1 only checks the configuration
#
# It makes the data and the base model (outputs/lab/ in the current folder) where they are missing. It runs over Ray or,
# where Ray cannot be imported, in one process (trainer.backend=local); the numbers agree up to rounding.
set -euo pipefail

recipe="$1"
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
settle "$recipe" preset=lab -- "${@:2}"
"$python" -m recipes.lab.prepare
"${train[@]}" "${arguments[@]}"
"$python" -m recipes.lab.report "$recipe" "${arguments[@]}"
