#!/usr/bin/env bash
# A task of the real model end to end (`make real`: checkable instructions): model, fine-tuning, reinforcement learning,
# held-out answers before and after, and a report.
#
#   bash recipes/real/run.sh [passages|arithmetic|search] [random|shuffled] [key=value ...]
#
# Keys are those of the training run; DRY_RUN=1 only checks them. For instructions two CPU cores without AMX took 49
# minutes, with it twenty by estimate: the minutes left begin with one or the other. Stages whose result is there are not
# run again. REAL_MODEL names another model, REAL_PORT another port of the retrieval server.
set -euo pipefail

words=()
for word in "$@"; do [[ "$word" == *=* ]] || words+=("$word"); done
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
recipe=grpo scores=(strict) evaluated=("preset=$preset") answers="outputs/real/answers$of_task" searching=()
steps=40 rate=() # fewer steps than run_smollm2_135m.sh of a recipe takes
case "$task" in
# Three times the preset's rate: 20 steps gain what 40 with it do (results/LOG.md, "A larger rate").
instructions) scores=("${guarded[@]}") steps=20 rate=(actor_rollout_ref.actor.optim.lr=3.0e-5) ;;
search)
    recipe=search_r1 evaluated=(preset=smollm2_135m) words=(${control:+"$control"})
    searching=(retriever.url=null "retriever.local={index: $files/index}")
    ;;
esac
name="real$of_task${naive:-}${control:+_$control}-$steps-steps"
run=outputs/$recipe/$name
train=(bash "$root/recipes/$recipe/run_smollm2_135m.sh" ${words[@]+"${words[@]}"} "trainer.total_training_steps=$steps"
    "trainer.experiment_name=$name" "trainer.default_local_dir=./$run" trainer.val_before_train=false
    trainer.test_freq=-1 ${rate[@]+"${rate[@]}"} ${keys[@]+"${keys[@]}"})

if is_dry_run ${keys[@]+"${keys[@]}"}; then exec "${train[@]}"; fi

minutes=(1 1 16 29 3) # of each stage of instructions: two cores that multiply 119 GFLOP/s in float32, and with AMX by estimate
[[ "$REAL_DTYPE" != bfloat16 ]] || minutes=(1 2 8 8 2)
since=$(date +%s) took=0 planned=0 # seconds of the stages that ran

announce() { # announce STAGE WORDS...: the minutes left, by how long this machine took for the stages before
    local left=0 last=$(($(date +%s) - since)) plan stage
    if (($1 > 2)); then # the first stage waits for the network
        plan=$((minutes[$1 - 2] * 60))
        if ((last * 5 > plan)); then took=$((took + last)) planned=$((planned + plan)); fi # else its result was there
    fi
    for stage in "${minutes[@]:$1-1}"; do ((left += stage)); done
    ((planned == 0)) || left=$(((left * took + planned - 1) / planned))
    if [[ "$task" == instructions ]]; then left="; about $left minutes left"; else left=""; fi
    echo "[$1/5] ${*:2}$left"
    since=$((since + last))
}

answer() { # answer NAME --model MODEL preset=PRESET | --run RUN: greedy answers to the held-out prompts, and their scores
    # What is there is kept: generate refuses answers of other weights or settings, and adds what is missing.
    "$python" -m core.evaluate generate "$recipe" "${@:2}" --out "$answers/$1.jsonl" ${searching[@]+"${searching[@]}"}
    "$python" -m core.evaluate score "$answers/$1.jsonl" --name "${scores[@]}"
}

mkdir -p "$answers"
DRY_RUN=1 "${train[@]}" > /dev/null
announce 1 "the model and the prompts"
bash "$root/recipes/real/start.sh" data "$task"
announce 2 "answers of the model as released"
answer released --model "$model" "${evaluated[@]}"
announce 3 "fine-tuning on demonstrations"
bash "$root/recipes/real/start.sh" sft "$task"
answer sft --model "$model_sft" "${evaluated[@]}"
announce 4 "reinforcement learning, $steps steps"
"${train[@]}"
announce 5 "answers of the trained model, and the report"
trained="$recipe${control:+-$control}${naive/_/-}-$(< "$run/latest_checkpointed_iteration.txt")-steps"
answer "$trained" --run "$run"
"$python" -m recipes.real.report "$answers"/{released,sft,"$trained"}.jsonl --scores "${scores[0]}" --frozen "$model" --run "$run"
