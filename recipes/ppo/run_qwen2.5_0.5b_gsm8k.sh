#!/usr/bin/env bash
# PPO on GSM8K: Qwen2.5-0.5B-Instruct, one GPU.
# The hyper-parameters are those that verl's published log prints: verl v0.2, verl-data,
# gsm8k/Qwen2.5-0.5B-bsz256_2-prompt1024-resp512-0.567.log. At that time the KL was always in the reward, the entropy
# bonus was 0.001 by default, and an update's trajectories were shuffled.
#
#   bash recipes/ppo/run_qwen2.5_0.5b_gsm8k.sh [key=value ...]           DRY_RUN=1 only checks the configuration
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
    data.train_batch_size=256 \
    data.max_prompt_length=1024 \
    data.max_response_length=512 \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.shuffle=True \
    actor_rollout_ref.actor.entropy_coeff=0.001 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=1 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \
    critic.optim.lr=1e-5 \
    algorithm.use_kl_in_reward=True \
    algorithm.kl_ctrl.kl_coef=0.001 \
    trainer.backend=ray \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=1 \
    trainer.total_epochs=15 \
    trainer.experiment_name="qwen2.5_0.5b_gsm8k-seed\${trainer.seed}" \
    trainer.save_freq=20 \
    trainer.test_freq=10 \
    -- "$@"
