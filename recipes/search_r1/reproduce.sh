#!/usr/bin/env bash
# Repeats a table of Search-R1; reproduce.yaml holds its tables, recipes/reproduce.sh explains the arguments.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../reproduce.sh" search_r1 "$@"
