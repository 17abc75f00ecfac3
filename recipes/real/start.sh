#!/usr/bin/env bash
# Makes what the runs on the instructions task start from, where it is missing: the model, the prompts, and for
# reinforcement learning the fine-tuned model. The run_smollm2_135m.sh of the recipes call this script.
#
#   bash recipes/real/start.sh data|demonstrations|sft
#
# Everything is written to outputs/real/ and outputs/sft/ of the current folder. REAL_MODEL names another model:
# REAL_MODEL=HuggingFaceTB/SmolLM2-135M-Instruct takes the released checkpoint from the hub.
set -euo pipefail

stage="$1"
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
python="$root/.venv/bin/python"
[[ -x "$python" ]] || python=python3
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-20000}" # OpenMP threads that spin longer block each other beside another process
model="${REAL_MODEL:-./outputs/real/model}"
files=outputs/real/instructions

if [[ -n "${REAL_MODEL:-}" ]]; then
    "$python" -m recipes.real.prepare --data-only
else
    "$python" -m recipes.real.prepare
fi
[[ "$stage" != data ]] || exit 0

answers="outputs/real/openings.jsonl"
if [[ ! -f $files/demonstrations.parquet ]]; then
    sampling=actor_rollout_ref.rollout.val_kwargs
    "$python" -m core.evaluate generate grpo --model "$model" --out "$answers" preset=smollm2_135m \
        data.val_files=./$files/openings.parquet $sampling.n=8 $sampling.do_sample=True $sampling.temperature=0.8
    "$python" -m recipes.real.demonstrations "$answers" --out $files/demonstrations.parquet
fi
[[ "$stage" != demonstrations ]] || exit 0

if [[ ! -f outputs/real/sft/config.json ]]; then
    "$python" -m recipes.sft.main_sft preset=smollm2_135m actor_rollout_ref.model.path="$model" \
        trainer.experiment_name=smollm2_135m-seed1
    "$python" -m core.export outputs/sft/smollm2_135m-seed1 outputs/real/sft
fi
