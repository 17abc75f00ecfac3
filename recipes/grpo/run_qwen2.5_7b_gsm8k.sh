#!/usr/bin/env bash
# GRPO on GSM8K: Qwen2.5-7B-Instruct, one node of 8 GPUs.
# The hyper-parameters are those of verl v0.6.1, examples/grpo_trainer/run_qwen2-7b.sh; the model is the successor of its
# Qwen2-7B. A pass has 32 trajectories where verl has 40: a memory setting, which divides a rank's share with
# preset=paper too.
#
#   bash recipes/grpo/run_qwen2.5_7b_gsm8k.sh [key=value ...]            DRY_RUN=1 only checks the configuration
#
# python -m data_preprocess.gsm8k makes the data; GSM8K_DIR names its folder. The output goes to outputs/grpo/ in the
# current folder.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/../env.sh"
data="${GSM8K_DIR:-$HOME/data/gsm8k}"

# Arguments before -- are this script's; those after it win. preset=script holds every setting that decides the result.
exec "$python" -m recipes.grpo.main_grpo \
    preset=script \
    data.train_files="$data/train.parquet" \
    data.val_files="$data/test.parquet" \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.ref.fsdp_config.param_offload=True \
    trainer.backend=ray \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=8 \
    trainer.experiment_name="qwen2.5_7b_gsm8k-seed\${trainer.seed}" \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    -- "$@"
