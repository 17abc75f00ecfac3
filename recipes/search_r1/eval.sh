#!/usr/bin/env bash
# Exact match on the seven test sets, greedy and sampled (T=1, top-p 0.95, as the published code does), with intervals,
# counts and the macro average. Nothing is trained: MODEL is a hub id (a released checkpoint) or an exported folder.
#
#   bash recipes/search_r1/eval.sh MODEL [key=value ...]          DRY_RUN=1 only checks the configuration
#
#   do_search=False                            R1; test sets made with --prompt r1: SEARCH_R1_TEST=~/data/search_r1/test_r1
#   do_search=False retriever.prefetch=True    single-shot RAG
#
# It evaluates all 51,713 questions, or data.val_max_samples of each set. The engine is the fastest that is installed
# here (actor_rollout_ref.rollout.name). The test sets are in SEARCH_R1_TEST, or ~/data/search_r1/test. This script has
# never run at its scale.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
test="${SEARCH_R1_TEST:-${SEARCH_R1_DIR:-$HOME/data/search_r1}/test}"
python="$root/.venv/bin/python"
[[ -x "$python" ]] || python=python3
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

[[ $# -ge 1 && "$1" != *=* ]] || { echo "usage: eval.sh MODEL [key=value ...]" >&2; exit 2; }
model="$1"
shift
name="eval-$(basename "$model")"
for word in "$@"; do [[ "$word" != trainer.reference=* ]] || name="eval-${word#*=}"; done # a row's runs have folders of their own
sets=""
for set in nq triviaqa popqa hotpotqa 2wikimultihopqa musique bamboogle; do sets+="${sets:+,}'$test/$set.parquet'"; done
own=(
    data.train_files="$test/nq.parquet" # checked at the start, never drawn from
    data.val_files="[$sets]"
    actor_rollout_ref.model.path="$model"
    algorithm.use_kl_in_reward=False
    algorithm.adv_estimator=reinforce_plus_plus # no critic, no reference
    trainer.val_only=True
    trainer.resume_mode=disable
)
sampled=actor_rollout_ref.rollout.val_kwargs
folder=outputs/search_r1

"$python" -m recipes.search_r1.main_search_r1 "${own[@]}" trainer.default_local_dir="$folder/$name-greedy" -- "$@"
"$python" -m recipes.search_r1.main_search_r1 "${own[@]}" trainer.default_local_dir="$folder/$name-sampled" \
    $sampled.do_sample=True $sampled.temperature=1.0 $sampled.top_p=0.95 -- "$@"
case "${DRY_RUN:-}" in
"" | 0 | false | no) "$python" -m recipes.search_r1.evaluation "$folder/$name-greedy" "$folder/$name-sampled" ;;
esac
