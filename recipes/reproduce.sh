#!/usr/bin/env bash
# Runs a table of a paper, in miniature on two cores or at the paper's size (results/tables/runner.py).
#
#   bash recipes/dapo/reproduce.sh                        lists the paper's tables, with verdicts and minutes
#   bash recipes/dapo/reproduce.sh table1                 runs what is missing of the miniature, writes and prints its page
#   SCALE=paper bash recipes/dapo/reproduce.sh table1     trains, exports and evaluates the rows at the paper's size
#
# DRY_RUN=1 lists what is missing. Type the command again to go on where it stopped.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 # a fork copies no pool of threads
exec "$python" -m results.tables.runner "$@"
