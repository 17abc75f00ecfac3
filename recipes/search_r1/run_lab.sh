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

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
python="$root/.venv/bin/python"
[[ -x "$python" ]] || python=python3
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
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
arguments=(preset="$preset" trainer.backend=ray "${url[@]}" -- "$@")

case "${DRY_RUN:-}" in
"" | 0 | false | no) ;;
*) exec "$python" -m recipes.search_r1.main_search_r1 "${arguments[@]}" ;;
esac
DRY_RUN=1 "$python" -m recipes.search_r1.main_search_r1 "${arguments[@]}" > /dev/null # reports a wrong key
if ! "$python" -c "import ray" 2> /dev/null; then
    echo "ray cannot be imported: the run is in one process, trainer.backend=local" >&2
    arguments=(preset="$preset" trainer.backend=local "${url[@]}" -- "$@")
fi
"$python" -m recipes.search_r1.knowledge_model --seed "$seed"
"$python" -m recipes.search_r1.retrieval_server --index "outputs/lab/knowledge/seed-$seed/index" --port "$port" \
    > /dev/null 2> "outputs/lab/knowledge/seed-$seed/server.log" &
server=$!
trap 'kill "$server" 2> /dev/null || true' EXIT
"$python" -m recipes.search_r1.main_search_r1 "${arguments[@]}"
"$python" -m recipes.lab.report search_r1 "${arguments[@]}"
