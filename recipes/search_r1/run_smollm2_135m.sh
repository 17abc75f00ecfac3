#!/usr/bin/env bash
# Search-R1 with SmolLM2-135M-Instruct on real questions and passages of Wikipedia (recipes/real/README.md), for two CPU
# cores: fine-tuning on episodes that a program has played, then GRPO with exact match as the reward.
#
#   bash recipes/search_r1/run_smollm2_135m.sh [random|shuffled] [key=value ...]      DRY_RUN=1 only checks
#
# It reads public data under DATA_DIR, and makes the corpus, its BM25 index, the model, the demonstrations and the
# fine-tuned model (outputs/real/ in the current folder) where they are missing. It starts a retrieval server on
# REAL_PORT (8124) and ends it. The hyper-parameters are in config/preset/smollm2_135m.yaml; recipes/real/train.sh does
# the work. The run goes to outputs/search_r1/.
set -euo pipefail

train="$(dirname "${BASH_SOURCE[0]}")/../real/train.sh"
arguments=(search_r1 search "$@")
[[ -z "${REAL_PORT:-}" ]] || arguments+=("retriever.url='http://127.0.0.1:$REAL_PORT/retrieve'")
source "$(dirname "${BASH_SOURCE[0]}")/../real/common.sh"

if is_dry_run ${keys[@]+"${keys[@]}"}; then exec bash "$train" "${arguments[@]}"; fi
DRY_RUN=1 bash "$train" "${arguments[@]}" > /dev/null # reports a wrong key now, not after minutes
bash "$root/recipes/real/start.sh" sft search
"$python" -m recipes.search_r1.retrieval_server --index outputs/real/search/index --port "${REAL_PORT:-8124}" \
    > /dev/null 2> outputs/real/search/server.log &
server=$!
trap 'kill "$server" 2> /dev/null || true' EXIT
bash "$train" "${arguments[@]}"
