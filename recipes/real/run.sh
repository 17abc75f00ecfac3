#!/usr/bin/env bash
# A task of the real model end to end (`make real`: checkable instructions): model, fine-tuning, reinforcement learning,
# held-out answers before and after, and a report.
#
#   bash recipes/real/run.sh [passages|arithmetic|search] [random|shuffled] [key=value ...]
#
# Keys are those of the training run; DRY_RUN=1 only checks them. For instructions it takes half an hour by estimate on
# two CPU cores with AMX, about two hours without: the minutes left are those of the first. Stages whose result is there
# are not run again. REAL_MODEL names another model, REAL_PORT another port of the retrieval server.
set -euo pipefail

STEPS=40   # of reinforcement learning; run_smollm2_135m.sh of a recipe alone takes more
MINUTES=30 # of all stages on two cores of 2024, for instructions

words=()
for word in "$@"; do [[ "$word" == *=* ]] || words+=("$word"); done
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
recipe=grpo scores=strict evaluated=("preset=$preset") answers="outputs/real/answers$of_task" searching=()
case "$task" in
instructions) scores=guarded ;;
search)
    recipe=search_r1 evaluated=(preset=smollm2_135m) words=($control)
    searching=(retriever.url=null "retriever.local={index: $files/index}")
    ;;
esac
name="real$of_task${naive:-}${control:+_$control}-$STEPS-steps"
run=outputs/$recipe/$name
train=(bash "$root/recipes/$recipe/run_smollm2_135m.sh" ${words[@]+"${words[@]}"} "trainer.total_training_steps=$STEPS"
    "trainer.experiment_name=$name" "trainer.default_local_dir=./$run" trainer.val_before_train=false
    trainer.test_freq=-1 ${keys[@]+"${keys[@]}"})

if is_dry_run; then exec "${train[@]}"; fi

announce() { # announce STAGE MINUTES_LEFT WORDS...
    local left=""
    [[ "$task" != instructions ]] || left="; about $2 of $MINUTES minutes left"
    echo "[$1/5] ${*:3}$left"
}

answer() { # answer NAME --model MODEL preset=PRESET | --run RUN: greedy answers to the held-out prompts, and their scores
    if [[ ! -f "$answers/$1.scores-$scores.jsonl" ]]; then
        "$python" -m core.evaluate generate "$recipe" "${@:2}" --out "$answers/$1.jsonl" ${searching[@]+"${searching[@]}"}
        "$python" -m core.evaluate score "$answers/$1.jsonl" --name "$scores"
    fi
}

mkdir -p "$answers"
DRY_RUN=1 "${train[@]}" > /dev/null
announce 1 30 "the model and the prompts"
bash "$root/recipes/real/start.sh" data "$task"
announce 2 29 "answers of the model as released"
answer released --model "$model" "${evaluated[@]}"
announce 3 27 "fine-tuning on demonstrations"
bash "$root/recipes/real/start.sh" sft "$task"
answer sft --model "$model_sft" "${evaluated[@]}"
announce 4 19 "reinforcement learning, $STEPS steps"
"${train[@]}"
announce 5 2 "answers of the trained model, and the report"
trained="$recipe${control:+-$control}${naive/_/-}"
answer "$trained" --run "$run"
"$python" -m recipes.real.report "$answers"/{released,sft,"$trained"}.jsonl --scores "$scores" --frozen "$model" --run "$run"
