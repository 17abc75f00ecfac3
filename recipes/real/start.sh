#!/usr/bin/env bash
# Makes what the runs on a task start from, where it is missing: the model, the prompts, and for reinforcement learning
# the fine-tuned model. The run_smollm2_135m.sh of the recipes call this script.
#
#   bash recipes/real/start.sh data|demonstrations|sft [passages|arithmetic|search]          the default is instructions
#
# Everything is written to outputs/real/ and outputs/sft/ of the current folder. passages and search need DATA_DIR
# (recipes/real/README.md). REAL_MODEL names another model: REAL_MODEL=HuggingFaceTB/SmolLM2-135M-Instruct takes the
# released checkpoint from the hub.
set -euo pipefail

stage="$1"
shift
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

made_with=outputs/real/made_with # demonstrations and the fine-tuned model are of one model
if [[ -f $made_with && "$(< "$made_with")" != "$model" ]]; then
    echo "REAL_MODEL=$model: outputs/real was made with $(< "$made_with"); remove outputs/real, or start in another folder" >&2
    exit 2
fi
mkdir -p outputs/real
if [[ ! -f $made_with ]]; then # in one move: another start.sh may read it now
    echo "$model" > "$made_with.$$"
    mv "$made_with.$$" "$made_with"
fi

"$python" -m recipes.real.prepare --task "$task" ${REAL_MODEL:+--data-only}
[[ "$stage" != data ]] || exit 0

if [[ ! -f $files/demonstrations.parquet ]]; then # passages and arithmetic have them from prepare
    case "$task" in
    instructions)
        answers="outputs/real/openings.jsonl"
        sampling=actor_rollout_ref.rollout.val_kwargs
        "$python" -m core.evaluate generate grpo --model "$model" --out "$answers" preset=smollm2_135m \
            data.val_files="$files/openings.parquet" $sampling.n=8 $sampling.do_sample=True $sampling.temperature=0.8
        "$python" -m recipes.real.demonstrations "$answers" --out "$files/demonstrations.parquet"
        ;;
    search) # one passage a search, of at most 224 tokens, as in recipes/search_r1/config/preset/smollm2_135m.yaml
        "$python" -m recipes.search_r1.index.cli --corpus "$files/corpus.jsonl" --index "$files/index" --backend bm25
        "$python" -m recipes.search_r1.demonstrations "$files/to_demonstrate.parquet" --index "$files/index" \
            --model "$model" --topk 1 --room 224 --out "$files/demonstrations.parquet"
        ;;
    esac
fi
[[ "$stage" != demonstrations ]] || exit 0

if [[ ! -f $model_sft/config.json ]]; then
    "$python" -m recipes.sft.main_sft preset="$preset" actor_rollout_ref.model.path="$model" \
        trainer.experiment_name="$preset-seed1"
    "$python" -m core.export "outputs/sft/$preset-seed1" "$model_sft"
fi
