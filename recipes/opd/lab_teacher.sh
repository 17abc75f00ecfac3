#!/usr/bin/env bash
# The teacher of run_lab.sh and of tables/: what GRPO makes of the lab's base model, unless it is there.
#
#   bash recipes/opd/lab_teacher.sh          30 steps of the hops task, to outputs/lab/teacher
#   bash recipes/opd/lab_teacher.sh maze     60 steps of mazes, to outputs/lab/maze/teacher
set -euo pipefail

recipes="$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=recipes/env.sh
source "$recipes/env.sh"
if [[ "${1:-}" == maze ]]; then
    teacher=outputs/lab/maze/teacher name=lab-maze-teacher
    train=("$recipes/lab/run_lab.sh" maze trainer.total_training_steps=60)
else
    teacher=outputs/lab/teacher name=lab-teacher
    train=("$recipes/grpo/run_lab.sh" trainer.total_training_steps=30)
fi
if [[ -f "$teacher/config.json" ]]; then exit; fi
bash "${train[@]}" "trainer.experiment_name=$name"
"$python" -m core.export "outputs/grpo/$name" "$teacher"
