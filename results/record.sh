#!/usr/bin/env bash
# Makes what is missing of the published runs (`make record`), and writes the pages of results/ again.
#
#   bash results/record.sh [labs] [real]              labs by default
#
#   labs   ppo, grpo, dapo and search_r1, tools, users and figures: seeds 1 to 3
#   real   SmolLM2-135M: instructions by GRPO, PPO and DAPO at one learning rate, arithmetic by GRPO, seeds 1 to 3, and
#          GRPO with the naive, the random and the shuffled reward; each is validated inside the run
#
# Commit first: a run names the commit that made it. A run that results/ holds is skipped: after a change that was meant
# to change its numbers remove its folder there and in outputs/. Runs take one thread each.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/../recipes/env.sh"
cd "$root"
export OMP_NUM_THREADS=1
mkdir -p outputs

run() { # run RECIPE NAME SCRIPT [WORD ...] [key=value ...]: one run, and its published copy
    local recipe="$1" name="$2" script="$3" log="outputs/record-$1-$2.log"
    shift 3
    if [[ -f "results/$recipe/$name/summary.json" ]]; then return; fi
    echo "$recipe/$name: $(date +%H:%M:%S)"
    bash "recipes/$script" "$@" "trainer.experiment_name=$name" "trainer.default_local_dir=./outputs/$recipe/$name" \
        trainer.cpu_threads=1 > "$log" 2>&1 || { tail -n 5 "$log" >&2 && return 1; }
    "$python" -m results.publish "outputs/$recipe/$name" --as "$recipe/$name"
}

seeds() { # seeds RECIPE NAME SCRIPT ...: the seeds 1 to 3 of a run
    local seed
    for seed in 1 2 3; do run "$1" "$2-seed$seed" "${@:3}" "trainer.seed=$seed"; done
}

labs() {
    local recipe kind figures=./outputs/lab/figures
    for recipe in ppo grpo dapo search_r1; do seeds "$recipe" lab "$recipe/run_lab.sh"; done
    for kind in tools users figures; do seeds grpo "lab-$kind" lab/run_lab.sh "$kind"; done
    seeds grpo lab-figures-blank lab/run_lab.sh figures "data.train_files=$figures/blank_train.parquet" \
        "data.val_files=$figures/blank_test.parquet"
}

real() {
    local recipe control steps=(trainer.total_training_steps=20 actor_rollout_ref.actor.optim.lr=3.0e-5)
    for recipe in grpo ppo dapo; do seeds "$recipe" real-instructions "$recipe/run_smollm2_135m.sh" "${steps[@]}"; done
    for control in naive random shuffled; do
        seeds grpo "real-instructions-$control" grpo/run_smollm2_135m.sh "$control" "${steps[@]}"
    done
    seeds grpo real-arithmetic grpo/run_smollm2_135m.sh arithmetic
    for control in random shuffled; do
        seeds grpo "real-arithmetic-$control" grpo/run_smollm2_135m.sh arithmetic "$control"
    done
}

(($#)) || set -- labs
for part in "$@"; do
    case "$part" in
    labs | real) "$part" ;;
    *) echo "$part: not one of labs, real" >&2 && exit 2 ;;
    esac
done
"$python" -m results.report --index
