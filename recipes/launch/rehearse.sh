#!/usr/bin/env bash
# Rehearse a script's night in minutes, before it costs GPUs: losses, a hang, a signal and a resume, with a tiny model.
#
#   bash recipes/launch/rehearse.sh recipes/dapo/run_qwen2.5_32b.sh                             on this machine alone
#   RAY_ADDRESS=HEAD_IP:6379 bash recipes/launch/rehearse.sh recipes/dapo/run_qwen2.5_32b.sh    on the nodes of a cluster
#
# The script's own settings run, shrunk to CPUs: two ranks at most on a node, its pools of engines, its algorithm and its
# restarts. Without RAY_ADDRESS there is one node. outputs/rehearsal/NAME/page.md in the current folder, which all nodes
# must see, tells what held; the exit status is 0 where everything did. Keys after SCRIPT are the script's.
set -euo pipefail

[[ $# -ge 1 && -f "$1" ]] || { echo "usage: rehearse.sh SCRIPT [key=value ...]" >&2; exit 2; }
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
python="$root/.venv/bin/python"
[[ -x "$python" ]] || python=python3
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" RAY_worker_niceness=0
exec "$python" -m recipes.launch.rehearse "$@"
