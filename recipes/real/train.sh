#!/usr/bin/env bash
# A task of the real model with a recipe; the run_smollm2_135m.sh of the recipes call this script.
#
#   bash recipes/real/train.sh RECIPE [passages|arithmetic|search] [naive] [random|shuffled] [key=value ...]
#
# It makes what is missing of model, data and fine-tuned model in outputs/ of the current folder. random and shuffled are
# controls: the reward is a coin, or the ground truth is another prompt's. DRY_RUN=1 only checks the configuration.
set -euo pipefail

recipe="$1"
shift
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
stage=sft own=()
case "$recipe" in
sft) stage=demonstrations own=("actor_rollout_ref.model.path=$model") ;;
search_r1) [[ "$task" != search ]] || preset=smollm2_135m$naive ;;
esac
if [[ -n "$control" ]]; then
    own+=("data.train_files=$files/train_$control.parquet" "trainer.experiment_name=${preset}_$control-seed\${trainer.seed}")
fi
train=("$python" -m "recipes.$recipe.main_$recipe" "preset=$preset" ${own[@]+"${own[@]}"} -- ${keys[@]+"${keys[@]}"})

if is_dry_run ${keys[@]+"${keys[@]}"}; then exec "${train[@]}"; fi
DRY_RUN=1 "${train[@]}" > /dev/null # reports a wrong key now, not after minutes
bash "$root/recipes/real/start.sh" "$stage" "$task"
exec "${train[@]}"
