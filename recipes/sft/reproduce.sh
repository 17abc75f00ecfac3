#!/usr/bin/env bash
# Runs a table of the recipe: the files in tables/. recipes/reproduce.sh explains the arguments.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../reproduce.sh" sft "$@"
