#!/usr/bin/env bash
# Search-R1 on NQ and HotpotQA, 1 node of 8 GPUs (arXiv:2503.09516).
#
#   bash recipes/search_r1/train.sh 3b|7b|14b base|instruct ppo|grpo|r1 [key=value ...]     DRY_RUN=1 only checks
#
# r1 is the baseline without search: PPO over data made with --prompt r1, in folders that end in _r1 (README.md).
# The hyper-parameters are those of the published scripts (preset=script); append preset=paper for the paper's.
# Start recipes/search_r1/run_retriever.sh and make the data (README.md) first; SEARCH_R1_DIR names their folder.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/../env.sh"
data="${SEARCH_R1_DIR:-$HOME/data/search_r1}"

usage="usage: train.sh 3b|7b|14b base|instruct ppo|grpo|r1 [key=value ...]"
[[ $# -ge 3 ]] || { echo "$usage" >&2; exit 2; }
case "$1-$2" in
3b-base) model=Qwen/Qwen2.5-3B ;;
3b-instruct) model=Qwen/Qwen2.5-3B-Instruct ;;
7b-base) model=Qwen/Qwen2.5-7B ;;
7b-instruct) model=Qwen/Qwen2.5-7B-Instruct ;;
14b-base) model=Qwen/Qwen2.5-14B ;;
14b-instruct) model=Qwen/Qwen2.5-14B-Instruct ;;
*) echo "$usage" >&2; exit 2 ;;
esac
offload=(
    critic.model.fsdp_config.param_offload=True
    critic.model.fsdp_config.optimizer_offload=True
)
prompts=""
case "$3" in
ppo) algorithm=("${offload[@]}" actor_rollout_ref.rollout.top_p=1.0) ;;
r1)
    algorithm=("${offload[@]}" actor_rollout_ref.rollout.top_p=1.0 do_search=False)
    prompts=_r1
    ;;
grpo) algorithm=( # the published code makes ten updates of 2,560 trajectories; 64 prompts an update make eight
    algorithm.adv_estimator=grpo
    algorithm.use_kl_in_reward=False
    actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.kl_loss_coef=0.001
    actor_rollout_ref.actor.kl_loss_type=low_var_kl
    actor_rollout_ref.actor.ppo_mini_batch_size=64
    actor_rollout_ref.rollout.n=5
) ;;
*) echo "$usage" >&2; exit 2 ;;
esac
name="qwen2.5_$1_$2_$3"
shift 3
sets=""
for set in nq triviaqa popqa hotpotqa 2wikimultihopqa musique bamboogle; do sets+="${sets:+,}'$data/test$prompts/$set.parquet'"; done

# Arguments before -- are this script's; those after it win. preset=script holds every setting that decides the result.
exec "$python" -m recipes.search_r1.main_search_r1 \
    preset=script \
    data.train_files="$data/nq_hotpotqa$prompts/train.parquet" \
    data.val_files="[$sets]" \
    data.val_max_samples=128 \
    actor_rollout_ref.model.path="$model" \
    actor_rollout_ref.actor.fsdp_config.param_offload=True \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \
    actor_rollout_ref.ref.fsdp_config.param_offload=True \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    "${algorithm[@]}" \
    trainer.backend=ray \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=8 \
    trainer.experiment_name="$name-seed\${trainer.seed}" \
    trainer.test_freq=100 \
    trainer.save_freq=100 \
    -- "$@"
