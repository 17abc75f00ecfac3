#!/usr/bin/env bash
# Search-R1 on questions about people who do not exist, with a tiny model: minutes on two CPU cores
# (recipes/lab/README.md).
#
#   bash recipes/search_r1/run_lab.sh [grpo|ppo] [key=value ...]          DRY_RUN=1 only checks the configuration
#
# It makes the knowledge of trainer.seed, its BM25 index and the base model (outputs/lab/knowledge/ in the current
# folder) where they are missing. It starts a retrieval server on LAB_PORT (8123) and ends it. The output goes to
# outputs/search_r1/.
# It runs over Ray or, where Ray cannot be imported, in one process. Over Ray a run repeats up to rounding, because the
# server's timing decides which answers decode together. With trainer.backend=local appended it repeats to the bit.
# The hyper-parameters are in config/preset/lab.yaml and lab_ppo.yaml.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/../lab/common.sh"
preset=lab
case "${1:-}" in
grpo) shift ;;
ppo) preset=lab_ppo && shift ;;
esac
port="${LAB_PORT:-8123}"
seed=1
for argument in "$@"; do [[ "$argument" == trainer.seed=* ]] && seed="${argument#*=}"; done
url=()
[[ -z "${LAB_PORT:-}" ]] || url=("retriever.url='http://127.0.0.1:$port/retrieve'")
settle search_r1 "preset=$preset" ${url[@]+"${url[@]}"} -- "$@"
"$python" -m recipes.search_r1.knowledge_model --seed "$seed"
"$python" -m recipes.search_r1.retrieval_server --index "outputs/lab/knowledge/seed-$seed/index" --port "$port" \
    > /dev/null 2> "outputs/lab/knowledge/seed-$seed/server.log" &
server=$!
trap 'kill "$server" 2> /dev/null || true' EXIT
"${train[@]}" "${arguments[@]}"
"$python" -m recipes.lab.report search_r1 "${arguments[@]}"
