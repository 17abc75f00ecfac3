#!/usr/bin/env bash
# The retrieval server of the Search-R1 runs, on http://127.0.0.1:8000/retrieve.
#
#   bash recipes/search_r1/run_retriever.sh [--port 8000] [--device cuda] [...]
#   DRY_RUN=1 only checks the arguments;  --help lists them all
#
# The default is the retriever of the published runs: flat search over the E5 index that download_wiki18.sh fetches to
# SEARCH_R1_DIR/wiki18 or ~/data/search_r1/wiki18. On GPUs where faiss has them, else on the CPU (RETRIEVER.md has memory
# and speed).
# RETRIEVER_INDEX names another index: a faiss file (e5_HNSW64.index), or a folder that recipes.search_r1.index.cli
# wrote (wiki18/bm25, for a laptop). RETRIEVER_CORPUS names the corpus where it does not lie beside a faiss file.
# This server has never run on the whole of Wikipedia; results/search_r1/retrieval.md has what was measured.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/../env.sh"
index="${RETRIEVER_INDEX:-${SEARCH_R1_DIR:-$HOME/data/search_r1}/wiki18/e5_Flat.index}"
corpus="${RETRIEVER_CORPUS:-}"

settings=(--index "$index")
if [[ "$index" == *.index ]]; then # a faiss file does not hold these
    settings+=(--encoder intfloat/e5-base-v2)
    corpus="${corpus:-$(dirname "$index")/wiki-18.jsonl.gz}"
fi
[[ -n "${RETRIEVER_INDEX:-}" ]] || settings+=(--backend flat)
[[ -z "$corpus" ]] || settings+=(--corpus "$corpus")

exec "$python" -m recipes.search_r1.retrieval_server "${settings[@]}" "$@"
