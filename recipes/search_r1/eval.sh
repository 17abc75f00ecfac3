#!/usr/bin/env bash
# Exact match on the seven test sets, greedy and sampled (T=1, top-p 0.95, as the published code does), with intervals,
# counts and the macro average. No learner is made: MODEL is a hub id (a released checkpoint) or an exported folder.
# Answers, scores and the JSON of the table stay in outputs/search_r1/eval-MODEL; a stopped call goes on there.
#
#   bash recipes/search_r1/eval.sh MODEL [key=value ...]          DRY_RUN=1 only checks the configuration
#
#   do_search=False                            R1; test sets made with --prompt r1: SEARCH_R1_TEST=~/data/search_r1/test_r1
#   do_search=False retriever.prefetch=True    single-shot RAG
#
#   trainer.backend=ray trainer.n_gpus_per_node=8 actor_rollout_ref.rollout.tensor_model_parallel_size=1
#                                              eight engines; without it one engine on one GPU
#
# It evaluates all 51,713 questions, or data.val_max_samples of each set. The engine is the fastest that is installed
# here (actor_rollout_ref.rollout.name). The test sets are in SEARCH_R1_TEST, or ~/data/search_r1/test.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/../env.sh"
test="${SEARCH_R1_TEST:-${SEARCH_R1_DIR:-$HOME/data/search_r1}/test}"

[[ $# -ge 1 && "$1" != *=* ]] || { echo "usage: eval.sh MODEL [key=value ...]" >&2; exit 2; }
model="$1"
shift
folder="outputs/search_r1/eval-$(basename "$model")"
sets=""
for set in nq triviaqa popqa hotpotqa 2wikimultihopqa musique bamboogle; do sets+="${sets:+,}'$test/$set.parquet'"; done
sampled=actor_rollout_ref.rollout.val_kwargs
own=() # a scorer of one's own is code, which only a command line names
for word in "$@"; do [[ "$word" != custom_reward_function.* ]] || own+=("$word"); done

generate() { # NAME key=value ...
    local out="$folder/$1.jsonl"
    shift
    "$python" -m core.evaluate generate search_r1 --model "$model" --out "$out" data.val_files="[$sets]" "$@"
    "$python" -m core.evaluate score "$out" --name exact_match ${own[@]+"${own[@]}"}
}

generate greedy "$@"
generate sampled $sampled.do_sample=True $sampled.temperature=1.0 $sampled.top_p=0.95 "$@"
"$python" -m results.reporting.accuracies "$folder/greedy.scores-exact_match.jsonl" "$folder/sampled.scores-exact_match.jsonl"
