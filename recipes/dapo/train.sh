#!/usr/bin/env bash
# DAPO on DAPO-Math-17k and AIME 2024 (arXiv:2503.14476): what the run scripts of this folder share.
#
#   bash recipes/dapo/train.sh 32b|7b_math|1.5b NAME preset=... [key=value ...] -- [key=value ...]     DRY_RUN=1 checks
#
# A run script's own settings stand before --, those that were typed after it; the latter win. The model's sizes here
# are memory settings: how many GPUs, over how many of them a sequence and a layer are split, what is kept on the host.
#
# 32b and 7b_math need a Ray cluster of 16 and 8 nodes. The repository, its .venv, data and model have the same paths on
# all of them, and the current folder is on a disk that they share. Without RAY_ADDRESS these runs do not start.
#
#   ray start --head --port=6379                # on the first node, the head node
#   ray start --address=HEAD_IP:6379            # on each of the others; `ray status` counts their GPUs
#   RAY_ADDRESS=HEAD_IP:6379 bash recipes/dapo/run_qwen2.5_32b.sh         # on any of them
#
# README.md, "A cluster", has the variables for the network. A run on several nodes restarts from its checkpoint up to
# three times (trainer.max_restarts), saves every 20 steps and keeps the last two checkpoints, of 393 GB each at 32B.
#
# prepare_dapo_data.sh makes the data; DAPO_DIR names its folder. The output goes to outputs/dapo/ in the current folder.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/../env.sh"
data="${DAPO_DIR:-$HOME/data/dapo}"

usage="usage: train.sh 32b|7b_math|1.5b NAME preset=... [key=value ...] -- [key=value ...]"
[[ $# -ge 3 ]] || { echo "$usage" >&2; exit 2; }
offload=(
    actor_rollout_ref.actor.fsdp_config.param_offload=True
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True
)
cluster=( # of a run on several nodes
    trainer.save_freq=20
    trainer.max_actor_ckpt_to_keep=2
    trainer.max_restarts=3
)
case "$1" in
32b) size=(
    actor_rollout_ref.model.path=Qwen/Qwen2.5-32B
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=8
    "${offload[@]}"
    actor_rollout_ref.rollout.tensor_model_parallel_size=4
    actor_rollout_ref.rollout.gpu_memory_utilization=0.80
    actor_rollout_ref.rollout.max_num_batched_tokens=22528
    "${cluster[@]}"
    trainer.nnodes=16
    trainer.n_gpus_per_node=8
    trainer.test_freq=5
) ;;
7b_math) size=(
    actor_rollout_ref.model.path=Qwen/Qwen2.5-Math-7B
    actor_rollout_ref.model.override_config.max_position_embeddings=32768
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=4
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=20480
    "${offload[@]}"
    actor_rollout_ref.rollout.tensor_model_parallel_size=4
    actor_rollout_ref.rollout.gpu_memory_utilization=0.80
    actor_rollout_ref.rollout.max_num_batched_tokens=10240
    "${cluster[@]}"
    trainer.nnodes=8
    trainer.n_gpus_per_node=8
    trainer.test_freq=10
) ;;
1.5b) size=(
    actor_rollout_ref.model.path=Qwen/Qwen2.5-1.5B
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5
    trainer.nnodes=1
    trainer.n_gpus_per_node=1
    trainer.test_freq=20
    trainer.save_freq=20
) ;;
*) echo "$usage" >&2; exit 2 ;;
esac
name="$2"
shift 2

exec "$python" -m recipes.dapo.main_dapo \
    data.train_files="$data/dapo_math/train.parquet" \
    data.val_files="$data/aime2024/test.parquet" \
    actor_rollout_ref.rollout.name=vllm \
    "${size[@]}" \
    trainer.backend=ray \
    trainer.experiment_name="$name-seed\${trainer.seed}" \
    "$@"
