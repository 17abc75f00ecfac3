#!/usr/bin/env bash
# Rejection sampling with a search engine, the baseline of Search-R1 (arXiv:2503.09516, section 4.2), 1 node of 8 GPUs.
#
#   bash recipes/sft/search_r1_rejection.sh 3b|7b [key=value ...]     DRY_RUN=1 only checks the fine-tuning
#
# The instruct model answers every training question five times, searching as in Search-R1; the episodes that end in a
# right answer are kept, and the model is fine-tuned on what it wrote in them. The paper gives these numbers and nothing
# of the fine-tuning: batch, schedule and epochs are config/sft.yaml's.
# Start recipes/search_r1/run_retriever.sh and make the data (recipes/search_r1/README.md) first; SEARCH_R1_DIR names
# their folder. Answers and demonstrations stay in outputs/sft/; a stopped call goes on there. Evaluate the export with
# recipes/search_r1/eval.sh.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/../env.sh"
data="${SEARCH_R1_DIR:-$HOME/data/search_r1}/nq_hotpotqa/train.parquet"

usage="usage: search_r1_rejection.sh 3b|7b [key=value ...]"
[[ $# -ge 1 ]] || { echo "$usage" >&2; exit 2; }
case "$1" in
3b) model=Qwen/Qwen2.5-3B-Instruct ;;
7b) model=Qwen/Qwen2.5-7B-Instruct ;;
*) echo "$usage" >&2; exit 2 ;;
esac
name="qwen2.5_$1_search_r1_rejection"
answers="outputs/sft/$name-answers"
shift
sampled=actor_rollout_ref.rollout.val_kwargs

if ! is_dry_run "$@"; then
    "$python" -m core.evaluate generate search_r1 --model "$model" --out "$answers.jsonl" \
        data.val_files="$data" $sampled.n=5 $sampled.do_sample=True $sampled.temperature=1.0 \
        actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
        trainer.backend=ray trainer.n_gpus_per_node=8
    "$python" -m core.evaluate score "$answers.jsonl" --name exact_match
    "$python" -m recipes.sft.rejection "$answers.scores-exact_match.jsonl" --out "$answers.parquet"
fi

# Arguments before -- are this script's; those after it win. An episode has 4,096 tokens and a last turn of 500.
exec "$python" -m recipes.sft.main_sft \
    data.train_files="./$answers.parquet" \
    data.max_prompt_length=4096 \
    data.max_response_length=500 \
    actor_rollout_ref.model.path="$model" \
    trainer.backend=ray \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=8 \
    trainer.experiment_name="$name-seed\${trainer.seed}" \
    trainer.save_freq=100 \
    -- "$@"
