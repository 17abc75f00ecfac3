#!/usr/bin/env bash
# PPO on GSM8K: deepseek-llm-7b-chat, one node of 8 GPUs.
# The hyper-parameters are those of verl v0.6.1, examples/ppo_trainer/run_deepseek7b_llm.sh.
#
#   bash recipes/ppo/run_deepseek7b_gsm8k.sh [key=value ...]             DRY_RUN=1 only checks the configuration
#
# python -m data_preprocess.gsm8k makes the data; GSM8K_DIR names its folder. The output goes to outputs/ppo/ in the
# current folder.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/../env.sh"
data="${GSM8K_DIR:-$HOME/data/gsm8k}"

# What stands before -- is this script's; the arguments after it win.
exec "$python" -m recipes.ppo.main_ppo \
    data.train_files="$data/train.parquet" \
    data.val_files="$data/test.parquet" \
    data.train_batch_size=1024 \
    data.max_prompt_length=512 \
    data.max_response_length=512 \
    data.filter_overlong_prompts=True \
    data.truncation=error \
    actor_rollout_ref.model.path=deepseek-ai/deepseek-llm-7b-chat \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \
    actor_rollout_ref.actor.use_kl_loss=False \
    actor_rollout_ref.actor.entropy_coeff=0 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=1 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \
    critic.optim.lr=1e-5 \
    critic.model.enable_gradient_checkpointing=True \
    critic.ppo_micro_batch_size_per_gpu=32 \
    algorithm.use_kl_in_reward=False \
    trainer.backend=ray \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=8 \
    trainer.experiment_name="deepseek7b_gsm8k-seed\${trainer.seed}" \
    trainer.total_epochs=15 \
    trainer.save_freq=20 \
    trainer.test_freq=1 \
    -- "$@"
