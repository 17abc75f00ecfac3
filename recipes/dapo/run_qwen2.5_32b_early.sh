#!/usr/bin/env bash
# DAPO before its token-level loss and dynamic sampling: Qwen2.5-32B, 16 nodes of 8 GPUs (arXiv:2503.14476).
# The hyper-parameters are those of verl-recipe, dapo/run_dapo_early_qwen2.5_32b.sh.
# This script has never run at its scale; it needs trainer.backend=ray and vLLM. Like the
# published run it splits each sequence over 8 GPUs, which is a memory setting.
#
#   bash recipes/dapo/run_qwen2.5_32b_early.sh [key=value ...]   DRY_RUN=1 only checks the configuration
#
# prepare_dapo_data.sh makes the data; DAPO_DIR names its folder. The output goes to outputs/dapo/ in the current folder.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
data="${DAPO_DIR:-$HOME/data/dapo}"
python="$root/.venv/bin/python"
[[ -x "$python" ]] || python=python3
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

# Arguments before -- are this script's; those after it win. preset=script holds every setting that decides the result.
exec "$python" -m recipes.dapo.main_dapo \
    preset=script \
    data.train_files="$data/dapo_math/train.parquet" \
    data.val_files="$data/aime2024/test.parquet" \
    algorithm.filter_groups.enable=False \
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-32B \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=8 \
    actor_rollout_ref.actor.fsdp_config.param_offload=True \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.80 \
    actor_rollout_ref.rollout.max_num_batched_tokens=22528 \
    trainer.backend=ray \
    trainer.nnodes=16 \
    trainer.n_gpus_per_node=8 \
    trainer.experiment_name=qwen2.5_32b_early \
    trainer.test_freq=5 \
    trainer.save_freq=5 \
    -- "$@"
