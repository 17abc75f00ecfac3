#!/usr/bin/env bash
# Repeats a table of Search-R1, row by row: data, training, evaluation, publishing, the table (results/reproduce.py).
#
#   bash recipes/search_r1/reproduce.sh [TABLE] [ROW ...] [--seeds N ...] [-- key=value ...]      DRY_RUN=1 prints the stages
#
# Without a table it lists them; reproduce.yaml holds them. Repeating the command goes on where it stopped.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
python="$root/.venv/bin/python"
[[ -x "$python" ]] || python=python3
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m results.reproduce search_r1 "$@"
