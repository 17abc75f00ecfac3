#!/usr/bin/env bash
# GRPO with a tiny model whose episodes an outside agent plays, a few minutes on two CPU cores. Sums with a calculator:
# the plain client (react), the openai-agents library (openai_agents) or an environment of verifiers (verifiers).
# Search-R1's questions: search.
#
#   bash recipes/agents/run_lab.sh [react|openai_agents|verifiers|search] [key=value ...]
#   DRY_RUN=1 in front only checks the configuration
#
# It makes data and base model (outputs/lab/ in the current folder) where they are missing, and for openai_agents and
# verifiers an environment of the agent's own (outputs/agents/). The search agent needs a retriever: RETRIEVER_URL, or
# the one that this script starts on LAB_PORT (8123). The output goes to outputs/grpo/ and, of search, to
# outputs/search_r1/.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/../lab/common.sh"
kind=react
case "${1:-}" in
react | openai_agents | verifiers | search) kind="$1" && shift ;;
esac
rollout=actor_rollout_ref.rollout
name="trainer.experiment_name=lab-agent-$kind-seed\${trainer.seed}"
# Episodes share the trainer's cores: on a busy machine an agent is not heard for longer than the default 30 s
own=("$rollout.multi_turn.tool_timeout_s=300" "$name")
sums=(preset=lab_tools "$rollout.multi_turn.enable=False" "$rollout.multi_turn.tool_config_path=null" \
    trainer.total_training_steps=20 trainer.test_freq=10 "${own[@]}")
server=""
trap '[[ -z "$server" ]] || kill "$server" 2> /dev/null || true' EXIT
case "$kind" in
react) settle grpo "${sums[@]}" "$rollout.agent.path=$here/react.py:run" -- "$@" ;;
openai_agents | verifiers)
    # Each episode is a process, so a step has fewer
    settle grpo "${sums[@]}" "$rollout.agent.command='bash $here/play.sh $kind'" \
        data.train_batch_size=8 actor_rollout_ref.actor.ppo_mini_batch_size=8 \
        data.val_max_samples=64 -- "$@"
    env="outputs/agents/$kind"
    [[ -e "$env/.installed" ]] || {
        "$python" -m venv "$env"
        "$env/bin/python" -m pip --quiet install -r "$here/requirements_$kind.txt"
        touch "$env/.installed"
    }
    rm -f "$env/socket"
    "$env/bin/python" "$here/resident.py" serve "$env/socket" "$here/${kind}_sums.py" &
    server=$!
    until [[ -S "$env/socket" ]]; do kill -0 "$server" && sleep 1; done
    ;;
search)
    settle search_r1 preset=lab "$rollout.agent_loop=outside_agent" "$rollout.agent.path=$here/search.py:run" "${own[@]}" -- "$@"
    seed=1
    for argument in "$@"; do [[ "$argument" == trainer.seed=* ]] && seed="${argument#*=}"; done
    "$python" -m recipes.search_r1.knowledge_model --seed "$seed"
    if [[ -z "${RETRIEVER_URL:-}" ]]; then
        port="${LAB_PORT:-8123}"
        export RETRIEVER_URL="http://127.0.0.1:$port/retrieve"
        "$python" -m recipes.search_r1.retrieval_server --index "outputs/lab/knowledge/seed-$seed/index" --port "$port" \
            > /dev/null 2> "outputs/lab/knowledge/seed-$seed/server.log" &
        server=$!
    fi
    ;;
esac
recipe=grpo
if [[ "$kind" == search ]]; then recipe=search_r1; else "$python" -m recipes.lab.sums; fi
"${train[@]}" "${arguments[@]}"
"$python" -m recipes.lab.report "$recipe" "${arguments[@]}"
