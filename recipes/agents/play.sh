#!/usr/bin/env bash
# Plays one episode with an agent of this folder, in the environment that run_lab.sh made for it.
#
#   bash recipes/agents/play.sh openai_agents_sums
set -euo pipefail

exec "outputs/agents/${1%_sums}/bin/python" "$(dirname "${BASH_SOURCE[0]}")/$1.py"
