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
#
# A scheduler that ends a job signals all of its processes, and a step cannot end once a process of Ray has died. Those
# block SIGHUP, SIGTERM and SIGUSR1 here, which the script alone hears: it ends its step, saves and ends, and then Ray
# ends too. What comes again within SAME_S is the same signal, since schedulers and shells pass signals on; one that
# comes later reaches the script as a second one. WARNED_FILE, where it is set, is made when SIGUSR1 came.
set -euo pipefail

usage="usage: NODE_RANK=0 NODES=16 HEAD_IP=10.0.0.1 ray_node.sh SCRIPT [key=value ...]"
[[ $# -ge 1 && -n "${NODE_RANK:-}" && -n "${NODES:-}" && -n "${HEAD_IP:-}" ]] || { echo "$usage" >&2; exit 2; }
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
if [[ -x "$root/.venv/bin/ray" ]]; then PATH="$root/.venv/bin:$PATH"; fi
command -v ray > /dev/null || { echo "ray: is not on PATH and not in $root/.venv; make setup installs it" >&2; exit 2; }
address="$HEAD_IP:${RAY_PORT:-6379}"
read -r -a options <<< "${RAY_START_OPTIONS:-}"
export RAY_AUTH_MODE="${RAY_AUTH_MODE:-token}" # what the head asks for, its drivers have to know
export RAY_JOB_STOP_WAIT_TIME_S="${RAY_JOB_STOP_WAIT_TIME_S:-3600}" # `ray job stop` kills after it, after 3 s by default
deadline=$((SECONDS + ${WAIT_S:-600}))
SAME_S=10 # as in core/run.py
set -m   # each background job is a process group of its own

ray_pid='' script_pid='' heard_at=''
signalled() { # signalled NAME NUMBER: passes a signal on to the script's processes, or ends a node that has none
    if [[ "$1" == USR1 && -n "${WARNED_FILE:-}" ]]; then : > "$WARNED_FILE"; fi
    # No `return` in here: bash would leave the wait that the signal ended by way of EXIT
    if [[ -z "$heard_at" ]] || ((SECONDS - heard_at >= SAME_S)); then
        if [[ -n "$script_pid" ]]; then
            kill -s "$1" -- "-$script_pid" 2> /dev/null || true
        elif [[ "$NODE_RANK" == 0 || -z "$ray_pid" || -n "$heard_at" ]]; then
            exit $((128 + $2))
        fi # else the node stays: the head's script has a step to end and a checkpoint to write
        heard_at=$SECONDS
    fi
}
trap 'signalled HUP 1' HUP
trap 'signalled INT 2' INT
trap 'signalled USR1 10' USR1
trap 'signalled TERM 15' TERM

# `ray start --block` in the background, not `ray stop` at the end: that would end every Ray of this user on the node.
start_ray() {
    python3 -c 'import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1})
os.execvp("ray", ["ray", "start", *sys.argv[1:]])' "$@" --block "${options[@]}" &
    ray_pid=$!
}
stop_ray() {
    trap '' HUP INT USR1 TERM
    [[ -z "$ray_pid" ]] || kill -KILL -- "-$ray_pid" 2> /dev/null || true # it hears nothing else
    wait 2> /dev/null
}
trap stop_ray EXIT

joined() { # how many nodes the head counts
    ray status --address="$address" 2> /dev/null |
        awk '/^Pending:/ {past = 1} !past && / node_/ {n += $1} END {print n + 0}'
}

if [[ "$NODE_RANK" == 0 ]]; then
    # Without tokens a script would run on whatever cluster answers there
    if timeout 5 bash -c "exec 3<> '/dev/tcp/$HEAD_IP/${RAY_PORT:-6379}'" 2> /dev/null; then
        echo "RAY_PORT=${RAY_PORT:-6379}: $address is another program's, perhaps another cluster's; set another port" >&2
        exit 2
    fi
    start_ray --head --node-ip-address="$HEAD_IP" --port="${RAY_PORT:-6379}"
    while
        sleep 2 || true # a head that cannot have its port ends first
        kill -0 "$ray_pid" 2> /dev/null || { echo "ray start --head ended; its messages stand above" >&2; exit 1; }
        [[ "$(joined)" -lt "$NODES" ]]
    do
        if ((SECONDS >= deadline)); then
            echo "$(joined) of $NODES nodes joined $address within WAIT_S=${WAIT_S:-600} seconds" >&2
            exit 1
        fi
    done
    RAY_ADDRESS="$address" bash "$@" &
    script_pid=$!
    while kill -0 "$script_pid" 2> /dev/null; do wait "$script_pid" || true; done # a signal ends a wait, too
    status=0
    wait "$script_pid" || status=$?
    while kill -0 -- "-$script_pid" 2> /dev/null; do sleep 0.5 || true; done # a shell that a signal ended leaves its command
    exit "$status"
else
    until ray health-check --address="$address" > /dev/null 2>&1; do
        ((SECONDS < deadline)) || { echo "no head at $address within WAIT_S=${WAIT_S:-600} seconds" >&2; exit 1; }
        sleep 2 || true
    done
    start_ray --address="$address"
    missed=0
    while kill -0 "$ray_pid" 2> /dev/null && ((missed < 3)); do # a busy head may miss one check
        sleep "${POLL_S:-10}" || true # a signal may end it
        if ray health-check --address="$address" > /dev/null 2>&1; then missed=0; else missed=$((missed + 1)); fi
    done
fi
