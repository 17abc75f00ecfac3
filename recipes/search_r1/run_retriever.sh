#!/usr/bin/env bash
# The retrieval server of the Search-R1 runs, on http://127.0.0.1:8000/retrieve.
#
#   bash recipes/search_r1/run_retriever.sh [--backend hnsw] [--port 8000] [--device cuda] [...]
#   DRY_RUN=1 only checks the arguments;  --help lists them all
#
# It searches the folder or faiss file in RETRIEVER_INDEX (default ~/data/search_r1/wiki18/bm25, which
# download_wiki18.sh makes) and, where the index does not name its corpus, the corpus in RETRIEVER_CORPUS.
# The command for the published E5 index is:
#   RETRIEVER_INDEX=~/data/search_r1/wiki18/e5_HNSW64.index RETRIEVER_CORPUS=~/data/search_r1/wiki18/wiki-18.jsonl.gz \
#       bash recipes/search_r1/run_retriever.sh --encoder intfloat/e5-base-v2
# This server has never run on the whole of Wikipedia; results/search_r1/retrieval.md has what was measured.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
index="${RETRIEVER_INDEX:-$HOME/data/search_r1/wiki18/bm25}"
python="$root/.venv/bin/python"
[[ -x "$python" ]] || python=python3
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

exec "$python" -m recipes.search_r1.retrieval_server \
    --index "$index" \
    ${RETRIEVER_CORPUS:+--corpus "$RETRIEVER_CORPUS"} \
    "$@"
