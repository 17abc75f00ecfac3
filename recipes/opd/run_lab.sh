#!/usr/bin/env bash
# The hops task with a tiny model, taught by one that GRPO trained for 30 steps, which the script makes where it is missing:
# a few minutes on two CPU cores (recipes/lab/README.md).
#
#   bash recipes/opd/run_lab.sh [key=value ...]          DRY_RUN=1 only checks the configuration
set -euo pipefail

recipes="$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=recipes/env.sh
source "$recipes/env.sh"
train=(bash "$recipes/lab/train_hops.sh" opd "$@")
if is_dry_run "$@"; then exec "${train[@]}"; fi
DRY_RUN=1 "${train[@]}" > /dev/null # reports a wrong key now, not after a minute
bash "$recipes/opd/lab_teacher.sh"
exec "${train[@]}"
