#!/usr/bin/env bash
# The retrieval server of the Search-R1 runs, on http://127.0.0.1:8000/retrieve.
#
#   bash recipes/search_r1/run_retriever.sh [--port 8000] [--device cuda] [...]
#   RETRIEVER_SHARDS=4 bash recipes/search_r1/run_retriever.sh        4 servers that hold a slice each, and their front
#   DRY_RUN=1 only checks the arguments;  --help lists them all
#
# The default is the retriever of the published runs: flat search over the E5 index that download_wiki18.sh fetches to
# SEARCH_R1_DIR/wiki18 or ~/data/search_r1/wiki18. On GPUs where faiss has them, else on the CPU (RETRIEVER.md has memory
# and speed).
# RETRIEVER_INDEX names another index: a faiss file (e5_HNSW64.index), or a folder that recipes.search_r1.index.cli
# wrote (wiki18/bm25, for a laptop). RETRIEVER_CORPUS names the corpus where it does not lie beside a faiss file.
# This server has never run on the whole of Wikipedia; results/search_r1/retrieval.md has what was measured.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
index="${RETRIEVER_INDEX:-${SEARCH_R1_DIR:-$HOME/data/search_r1}/wiki18/e5_Flat.index}"
corpus="${RETRIEVER_CORPUS:-}"
python="$root/.venv/bin/python"
[[ -x "$python" ]] || python=python3
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

settings=(--index "$index")
if [[ "$index" == *.index ]]; then # a faiss file does not hold these
    settings+=(--encoder intfloat/e5-base-v2)
    corpus="${corpus:-$(dirname "$index")/wiki-18.jsonl.gz}"
fi
[[ -n "${RETRIEVER_INDEX:-}" ]] || settings+=(--backend flat)
[[ -z "$corpus" ]] || settings+=(--corpus "$corpus")

server=("$python" -m recipes.search_r1.retrieval_server)
shards="${RETRIEVER_SHARDS:-1}"
if [[ ! "$shards" =~ ^[1-9][0-9]*$ ]]; then
    echo "run_retriever.sh: RETRIEVER_SHARDS=$shards: must be a whole number of servers, at least 1" >&2
    exit 2
fi
if ((shards == 1)); then
    exec "${server[@]}" "${settings[@]}" "$@"
fi
if [[ "${DRY_RUN:-0}" != 0 ]]; then
    exec "${server[@]}" "${settings[@]}" --shard "1/$shards" "$@"
fi

# Slices on free ports, which each prints. What acts after the search is the front's, the other arguments are theirs.
front=() rest=()
while (($#)); do
    case "$1" in
        --host=* | --port=* | --topk=* | --max-*=* | --rerank*=*) front+=("$1"); shift ;;
        --host | --port | --topk | --max-* | --rerank*) front+=("$1" "${2:?$1 needs a value}"); shift 2 ;;
        *) rest+=("$1"); shift ;;
    esac
done
ports="$(mktemp -d)"
pids=()
trap '((${#pids[@]})) && kill "${pids[@]}" 2>/dev/null; rm -rf "$ports"' EXIT
trap 'exit 143' TERM
trap 'exit 130' INT
threads=$(( $(nproc) / shards > 0 ? $(nproc) / shards : 1 ))
for ((number = 1; number <= shards; number++)); do
    "${server[@]}" "${settings[@]}" --shard "$number/$shards" --port 0 --threads "$threads" "${rest[@]}" \
        >"$ports/$number" &
    pids+=($!)
    # The first one scans and unpacks a corpus that was never opened; the others find that done.
    until [[ -s "$ports/$number" ]]; do kill -0 "${pids[-1]}" 2>/dev/null || exit 2; sleep 0.2; done
done
addresses=()
for ((number = 1; number <= shards; number++)); do addresses+=("http://127.0.0.1:$(<"$ports/$number")"); done
"${server[@]}" --shards "${addresses[@]}" "${front[@]}" &
pids+=($!)
wait "$!" # a server in the foreground would keep a signal from ending the others
