#!/usr/bin/env bash
# Start Ray on one of several nodes; on the first one run a script of a recipe over all of them.
# slurm.sbatch and skypilot.yaml start this file on every node. KubeRay starts Ray itself and does not need it.
#
#   NODE_RANK=0 NODES=16 HEAD_IP=10.0.0.1 bash recipes/launch/ray_node.sh SCRIPT [key=value ...]
#
# Node 0 starts the head, waits until all nodes have joined, and runs SCRIPT with RAY_ADDRESS set; its exit status is
# that of SCRIPT. The other nodes join and stay until the head is gone. RAY_PORT (6379) is the head's port, WAIT_S (600)
# how many seconds all nodes may take to join, RAY_START_OPTIONS goes to every `ray start`. Ray asks for a token:
# RAY_AUTH_TOKEN is the same on all nodes, or their ~/.ray/auth_token is one file; RAY_AUTH_MODE=disabled has none.
set -euo pipefail

usage="usage: NODE_RANK=0 NODES=16 HEAD_IP=10.0.0.1 ray_node.sh SCRIPT [key=value ...]"
[[ $# -ge 1 && -n "${NODE_RANK:-}" && -n "${NODES:-}" && -n "${HEAD_IP:-}" ]] || { echo "$usage" >&2; exit 2; }
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
if [[ -x "$root/.venv/bin/ray" ]]; then PATH="$root/.venv/bin:$PATH"; fi
command -v ray > /dev/null || { echo "ray: is not on PATH and not in $root/.venv; make setup installs it" >&2; exit 2; }
address="$HEAD_IP:${RAY_PORT:-6379}"
read -r -a options <<< "${RAY_START_OPTIONS:-}"
export RAY_AUTH_MODE="${RAY_AUTH_MODE:-token}" # what the head asks for, its drivers have to know
deadline=$((SECONDS + ${WAIT_S:-600}))

# `ray start --block` in the background, not `ray stop` at the end: that would end every Ray of this user on the node.
ray_pid=
stop_ray() {
    [[ -z "$ray_pid" ]] || kill "$ray_pid" 2> /dev/null || true
    wait
}
trap stop_ray EXIT
trap 'exit 143' TERM INT

joined() { # how many nodes the head counts
    ray status --address="$address" 2> /dev/null | awk '/^Pending:/ {past = 1} !past && / node_/ {n += $1} END {print n + 0}'
}

if [[ "$NODE_RANK" == 0 ]]; then
    ray start --head --node-ip-address="$HEAD_IP" --port="${RAY_PORT:-6379}" --block "${options[@]}" &
    ray_pid=$!
    until [[ "$(joined)" -ge "$NODES" ]]; do
        kill -0 "$ray_pid" 2> /dev/null || { echo "ray start --head ended; its messages stand above" >&2; exit 1; }
        if ((SECONDS >= deadline)); then
            echo "$(joined) of $NODES nodes joined $address within WAIT_S=${WAIT_S:-600} seconds" >&2
            exit 1
        fi
        sleep 2
    done
    RAY_ADDRESS="$address" bash "$@"
else
    until ray health-check --address="$address" > /dev/null 2>&1; do
        ((SECONDS < deadline)) || { echo "no head at $address within WAIT_S=${WAIT_S:-600} seconds" >&2; exit 1; }
        sleep 2
    done
    ray start --address="$address" --block "${options[@]}" &
    ray_pid=$!
    while kill -0 "$ray_pid" 2> /dev/null && ray health-check --address="$address" > /dev/null 2>&1; do
        sleep "${POLL_S:-10}"
    done
fi
