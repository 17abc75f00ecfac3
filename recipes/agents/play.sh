#!/usr/bin/env bash
# Plays one episode with an agent that run_lab.sh has made resident in an environment of its own.
#
#   bash recipes/agents/play.sh verifiers
set -euo pipefail

env="outputs/agents/$1"
exec "$env/bin/python" -S -E "$(dirname "${BASH_SOURCE[0]}")/resident.py" play "$env/socket"
