#!/usr/bin/env bash
# Repeats a table of a paper, row by row: data, training, evaluation, publishing, the table (results/reproduce.py).
#
#   bash recipes/dapo/reproduce.sh [TABLE] [ROW ...] [--seeds N ...] [-- key=value ...]      DRY_RUN=1 prints the stages
#
# Without a table it lists them; recipes/<recipe>/reproduce.yaml holds them. Repeating the command goes on where it
# stopped. The recipes' scripts of this name call this one with their own name first.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
exec "$python" -m results.reproduce "$@"
