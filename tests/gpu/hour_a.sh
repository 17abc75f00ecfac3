#!/usr/bin/env bash
# An hour on one GPU, part A: kernels, output head, layers at the width of 32B.
# It needs neither vLLM nor Ray. A step is not repeated once it is done at this commit.
#
#   bash tests/gpu/hour_a.sh [STEP ...]     all steps, or those that are named; --again repeats what is done
#
# Results go to results/gpu/<step>.json, the tables to results/gpu/README.md. On a machine without a GPU
# bash tests/gpu/hour_a.sh --device cpu --size tiny --out FOLDER rehearses it.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
python="$root/.venv/bin/python"
[[ -x "$python" ]] || python=python3
cd "$root"
exec "$python" -m tests.gpu.hour "$@"
