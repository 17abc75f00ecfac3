#!/usr/bin/env bash
# Repeats a table of GRPO; reproduce.yaml holds its tables, recipes/reproduce.sh explains the arguments.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../reproduce.sh" grpo "$@"
