#!/usr/bin/env bash
# Records the published lab runs again (`make record`), after a change that was meant to change
# their numbers.
#
#   bash results/record.sh [labs] [others]          these by default
#   bash results/record.sh real                                         the real model, days on two cores without AMX
#
#   labs      grpo, ppo, dapo and search_r1, seeds 1 to 3          results/RECIPE/lab-seedN
#   others    tools, users, figures                                results/RECIPE/lab-NAME
#   real      recipes/real: seeds 1 to 3, controls                 results/RECIPE/real-NAME, outputs/real/answers_TASK
#
# Commit first: a run names the commit that made it. Runs go to outputs/ of this clone, with one thread each, those of labs two
# at a time; a run that is finished there is published as it is, so that a recording which was stopped goes on: remove outputs/
# for another one. Afterwards it writes the tables again; `make verified` repeats the first seeds.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/../recipes/env.sh"
export OMP_NUM_THREADS=1
cd "$root"
mkdir -p outputs
trap 'kill $(jobs -p) 2> /dev/null || true' EXIT

run() { # run RECIPE NAME SCRIPT [WORD ...] [key=value ...]: one run, and its published copy
    local recipe="$1" name="$2" script="$3"
    shift 3
    echo "$recipe/$name: $(date +%H:%M:%S)"
    bash "recipes/$script" "$@" trainer.cpu_threads=1 > "outputs/record-$recipe-$name.log" 2>&1 ||
        { tail -n 5 "outputs/record-$recipe-$name.log" >&2 && return 1; }
    "$python" -m results.publish "outputs/$recipe/$name" --as "$recipe/$name"
}

seeds() { # seeds RECIPE NAME SCRIPT ...: the seeds 1 to 3 of a run
    local seed
    for seed in 1 2 3; do run "$1" "$2-seed$seed" "${@:3}" "trainer.seed=$seed"; done
}

labs() {
    "$python" -m recipes.lab.prepare
    { seeds search_r1 lab search_r1/run_lab.sh && seeds dapo lab dapo/run_lab.sh; } &
    seeds grpo lab grpo/run_lab.sh
    seeds ppo lab ppo/run_lab.sh
    wait $!
}

others() {
    local figures=./outputs/lab/figures seed
    "$python" -m recipes.lab.prepare
    run grpo lab-tools-seed1 lab/run_lab.sh tools
    seeds grpo lab-users lab/run_lab.sh users
    seeds grpo lab-figures lab/run_lab.sh figures
    for seed in 1 2 3; do
        run grpo "lab-figures-blank-seed$seed" lab/run_lab.sh figures "data.train_files=$figures/blank_train.parquet" \
            "data.val_files=$figures/blank_test.parquet" "trainer.seed=$seed" \
            "trainer.experiment_name=lab-figures-blank-seed$seed"
    done
    run search_r1 lab-ppo-seed1 search_r1/run_lab.sh ppo trainer.total_training_steps=6 trainer.test_freq=6 \
        trainer.save_freq=-1
}

searching=(retriever.url=null "retriever.local={index: ./outputs/real/search/index}") # for answers of the search task

real_run() { # real_run NAME SCRIPT [WORD ...] [key=value ...]: a run, its published copy, and its held-out answers
    local name="$1" script="$2" recipe="${2%%/*}" scores=(strict)
    shift 2
    local task=instructions word from=()
    for word in "$@"; do case "$word" in passages | arithmetic) task="$word" ;; esac; done
    case "$recipe-$task" in
    search_r1-*) task=search from=("${searching[@]}") ;;
    *-instructions) scores=("${guarded[@]}") ;;
    esac
    local answers="outputs/real/answers_$task/$name.jsonl"
    [[ $recipe == grpo || $task == search ]] || answers="outputs/real/answers_$task/$recipe-$name.jsonl"
    echo "$recipe/$name: $(date +%H:%M:%S)"
    mkdir -p "${answers%/*}"
    {
        bash "recipes/$script" "$@" "trainer.experiment_name=$name" "trainer.default_local_dir=./outputs/$recipe/$name" &&
            "$python" -m results.publish "outputs/$recipe/$name" --as "$recipe/$name" &&
            "$python" -m core.evaluate generate "$recipe" --run "outputs/$recipe/$name" --out "$answers" \
                ${from[@]+"${from[@]}"} &&
            "$python" -m core.evaluate score "$answers" --name "${scores[@]}"
    } > "outputs/record-$recipe-$name.log" 2>&1 || { tail -n 5 "outputs/record-$recipe-$name.log" >&2 && return 1; }
}

real_start() { # real_start TASK PRESET: answers of the model as released and after fine-tuning, which is made
    local task="$1" answers="outputs/real/answers_$1" recipe=grpo stage path scores=(strict) from=()
    [[ $task != instructions ]] || scores=("${guarded[@]}")
    [[ $task != search ]] || recipe=search_r1 from=("${searching[@]}")
    mkdir -p "$answers"
    {
        bash recipes/real/start.sh sft "$task" || return 1
        for stage in model sft; do
            [[ $task == instructions || $stage == model ]] || stage="sft_$task"
            path="./outputs/real/$stage"
            [[ $stage != model ]] || path="$model"
            "$python" -m core.evaluate generate "$recipe" "preset=$2" --model "$path" \
                --out "$answers/$stage.jsonl" ${from[@]+"${from[@]}"} &&
                "$python" -m core.evaluate score "$answers/$stage.jsonl" --name "${scores[@]}" || return 1
        done
    } > "outputs/record-start-$task.log" 2>&1
}

real_tuned() { # real_tuned SEED: fine-tuning on instructions, its published copy, and its held-out answers
    local seed="$1" run="outputs/sft/smollm2_135m-seed$1" answers="outputs/real/answers_instructions/sft-seed$1.jsonl"
    echo "sft/real-seed$seed: $(date +%H:%M:%S)"
    {
        bash recipes/sft/run_smollm2_135m.sh "trainer.seed=$seed" && # the first seed was the start of the others
            "$python" -m results.publish "$run" --as "sft/real-seed$seed" &&
            "$python" -m core.export "$run" "outputs/real/sft-seed$seed" &&
            "$python" -m core.evaluate generate grpo preset=smollm2_135m --model "./outputs/real/sft-seed$seed" \
                --out "$answers" &&
            "$python" -m core.evaluate score "$answers" --name "${guarded[@]}"
    } > "outputs/record-sft-seed$seed.log" 2>&1 || { tail -n 5 "outputs/record-sft-seed$seed.log" >&2 && return 1; }
}

failed=""
queue() { # queue COMMAND ...: runs it beside the others, REAL_AT_ONCE at a time
    while (($(jobs -rp | wc -l) >= ${REAL_AT_ONCE:-1})); do wait -n || failed=1; done
    "$@" &
}

settle() { # waits for what was queued; fails where any of it failed
    local status
    while true; do
        status=0
        wait -n || status=$?
        ((status != 127)) || break # none is left
        ((status == 0)) || failed=1
    done
    [[ -z "$failed" ]] || { echo "a run failed: see outputs/record-*.log; what is finished is kept" >&2 && return 1; }
}

real() {
    local faster=actor_rollout_ref.actor.optim.lr=3.0e-5
    local grpo=grpo/run_smollm2_135m.sh traced=(trainer.trace.freq=20 trainer.trace.groups=10) seed task control port=8123
    source recipes/real/common.sh # the precision and the memory of all stages
    [[ "$REAL_DEVICE" == cuda ]] || unset OMP_NUM_THREADS
    mkdir -p outputs/real
    bash recipes/real/start.sh data
    queue real_start instructions smollm2_135m
    for task in arithmetic passages; do queue real_start "$task" "smollm2_135m_$task"; done
    queue real_start search smollm2_135m
    settle
    for seed in 1 2 3; do
        queue real_tuned "$seed"
        queue real_run "real-seed$seed" $grpo "trainer.seed=$seed" trainer.total_training_steps=150 "${traced[@]}"
        queue real_run "real-lr3e-5-seed$seed" $grpo "trainer.seed=$seed" "$faster" \
            "${traced[@]}"
    done
    for task in arithmetic passages naive; do
        for seed in 1 2 3; do
            queue real_run "real-$task-seed$seed" $grpo "$task" "trainer.seed=$seed" "${traced[@]}"
        done
    done
    for control in random shuffled; do
        for task in arithmetic passages; do queue real_run "real-$task-$control-seed1" $grpo "$task" "$control"; done
        queue real_run "real-$control-seed1" $grpo "$control"
    done
    for task in dapo ppo; do
        for seed in 1 2 3; do
            queue real_run "real-seed$seed" $task/run_smollm2_135m.sh "trainer.seed=$seed" "${traced[@]}"
        done
    done
    for task in arithmetic passages; do
        queue real_run "real-$task-untuned-seed1" $grpo "$task" "actor_rollout_ref.model.path=$model" "$faster"
    done
    queue real_run real-untuned-seed1 $grpo "actor_rollout_ref.model.path=$model" "$faster"
    for seed in 1 2 3; do
        REAL_PORT=$((++port)) queue real_run "real-search-seed$seed" search_r1/run_smollm2_135m.sh \
            "trainer.seed=$seed" "${traced[@]}"
    done
    for control in random shuffled; do
        REAL_PORT=$((++port)) queue real_run "real-search-$control-seed1" search_r1/run_smollm2_135m.sh \
            "$control" "${traced[@]}"
    done
    settle
}

(($#)) || set -- labs others
for part in "$@"; do
    case "$part" in
    labs | others | real) "$part" ;;
    *) echo "$part: not one of labs, others, real" >&2 && exit 2 ;;
    esac
done
"$python" -m results.report --index
