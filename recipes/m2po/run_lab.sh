#!/usr/bin/env bash
# The hops task with a tiny model: a few minutes on two CPU cores (recipes/lab/README.md).
#
#   bash recipes/m2po/run_lab.sh [key=value ...]          DRY_RUN=1 only checks the configuration
set -euo pipefail

exec bash "$(dirname "${BASH_SOURCE[0]}")/../lab/train_hops.sh" m2po "$@"
