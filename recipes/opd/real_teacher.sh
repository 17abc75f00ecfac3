#!/usr/bin/env bash
# Makes the teacher of run_smollm2_135m.sh, outputs/real/teacher of the current folder, where it is missing: what 20 steps
# of GRPO make of the fine-tuned model.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/../real/common.sh"
name=smollm2_135m_teacher-seed1
if [[ ! -f outputs/real/teacher/config.json ]]; then
    bash "$root/recipes/grpo/run_smollm2_135m.sh" trainer.total_training_steps=20 trainer.val_before_train=false \
        actor_rollout_ref.actor.optim.lr=3.0e-5 "trainer.experiment_name=$name" "trainer.default_local_dir=./outputs/grpo/$name"
    "$python" -m core.export "outputs/grpo/$name" outputs/real/teacher
fi
