#!/usr/bin/env bash
# The real model end to end (`make real`): model, fine-tuning, GRPO, held-out answers before and after, and a report.
#
#   bash recipes/real/run.sh [key=value ...]          keys are those of the GRPO run; DRY_RUN=1 only checks them
#
# Half an hour by estimate on two CPU cores with AMX, about two hours without: the minutes left are those of the first.
# Stages whose result is there are not run again. REAL_MODEL names another model.
set -euo pipefail

STEPS=40   # of GRPO; recipes/grpo/run_smollm2_135m.sh alone takes more
MINUTES=30 # of all stages on two cores of 2024

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
python="$root/.venv/bin/python"
[[ -x "$python" ]] || python=python3
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-20000}" # OpenMP threads that spin longer block each other beside another process
name=real-$STEPS-steps
run=outputs/grpo/$name
answers=outputs/real/answers
grpo=(bash "$root/recipes/grpo/run_smollm2_135m.sh" "trainer.total_training_steps=$STEPS" "trainer.experiment_name=$name"
    "trainer.default_local_dir=./$run" trainer.val_before_train=false trainer.test_freq=-1 "$@")

case "${DRY_RUN:-}" in
"" | 0 | false | no) ;;
*) exec "${grpo[@]}" ;;
esac

announce() { # announce STAGE MINUTES_LEFT WORDS...
    echo "[$1/5] ${*:3}; about $2 of $MINUTES minutes left"
}

answer() { # answer NAME MODEL: greedy answers to the held-out prompts, and their scores
    if [[ ! -f "$answers/$1.scores-guarded.jsonl" ]]; then
        "$python" -m core.evaluate generate grpo --model "$2" --out "$answers/$1.jsonl" preset=smollm2_135m
        "$python" -m core.evaluate score "$answers/$1.jsonl" --name guarded
    fi
}

mkdir -p "$answers"
DRY_RUN=1 "${grpo[@]}" > /dev/null
announce 1 30 "the model and the prompts"
bash "$root/recipes/real/start.sh" data
announce 2 29 "answers of the model as released"
answer released "${REAL_MODEL:-./outputs/real/model}"
announce 3 27 "fine-tuning on the model's own sentences"
bash "$root/recipes/real/start.sh" sft
answer sft ./outputs/real/sft
announce 4 19 "GRPO, $STEPS steps"
"${grpo[@]}"
if [[ ! -f outputs/real/$name/config.json ]]; then
    "$python" -m core.export "$run" "outputs/real/$name"
fi
announce 5 2 "answers of the trained model, and the report"
answer grpo "./outputs/real/$name"
"$python" -m recipes.real.report "$answers"/{released,sft,grpo}.jsonl --frozen "${REAL_MODEL:-./outputs/real/model}" --run "$run"
