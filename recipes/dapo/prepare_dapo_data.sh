#!/usr/bin/env bash
# Downloads the data of DAPO: its 17,398 training prompts, each once, and the 30 questions of AIME 2024.
#
#   bash recipes/dapo/prepare_dapo_data.sh [FOLDER]       default: DAPO_DIR, or ~/data/dapo
#
# python -m data_preprocess.dapo_math --local_dataset_path FILE reads a file that is here already; so does aime.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/../env.sh"
data="${1:-${DAPO_DIR:-$HOME/data/dapo}}"

"$python" -m data_preprocess.dapo_math --local_dir "$data/dapo_math"
"$python" -m data_preprocess.aime --local_dir "$data/aime2024"
