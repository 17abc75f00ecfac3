#!/usr/bin/env bash
# Rejection sampling on the hops task with a tiny model: a minute or two on two CPU cores (recipes/lab/README.md).
#
#   bash recipes/sft/run_lab.sh [key=value ...]          DRY_RUN=1 only checks the configuration
#
# The base model answers 2,048 training questions eight times each (python -m core.evaluate), its right answers are kept
# (python -m recipes.sft.rejection), and the base model is fine-tuned on them. Data and base model are made in
# outputs/lab/ of the current folder where they are missing, the run goes to outputs/sft/. The hyper-parameters are in
# config/preset/lab.yaml. It runs over Ray or, where Ray cannot be imported, in one process.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/../lab/common.sh"
settle sft preset=lab -- "$@"
"$python" -m recipes.lab.prepare
base=outputs/lab/base/current
answers="outputs/lab/sft/$(basename "$(readlink -f "$base")")/answers" # those of another base are other answers
sampling=actor_rollout_ref.rollout.val_kwargs
"$python" -m core.evaluate generate sft --model "./$base" --out "$answers.jsonl" preset=lab \
    data.val_files=./outputs/lab/data/train.parquet data.val_max_samples=2048 $sampling.n=8
"$python" -m core.evaluate score "$answers.jsonl" --name hops
"$python" -m recipes.sft.rejection "$answers.scores-hops.jsonl" --out outputs/lab/sft/kept.parquet
"${train[@]}" "${arguments[@]}"
"$python" -m recipes.lab.report sft "${arguments[@]}"
