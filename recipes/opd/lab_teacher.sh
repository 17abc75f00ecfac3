#!/usr/bin/env bash
# The teacher of run_lab.sh and of tables/: GRPO trains it for 30 steps of the hops task, unless outputs/lab/teacher is there.
set -euo pipefail

recipes="$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=recipes/env.sh
source "$recipes/env.sh"
if [[ -f outputs/lab/teacher/config.json ]]; then exit; fi
bash "$recipes/grpo/run_lab.sh" trainer.total_training_steps=30 trainer.experiment_name=lab-teacher
"$python" -m core.export outputs/grpo/lab-teacher outputs/lab/teacher
