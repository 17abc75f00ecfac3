#!/usr/bin/env bash
# The environment of the cross-check: the published packages themselves, away from this repository's own.
#   bash tests/crosscheck/make_env.sh && .venv/bin/python -m pytest -m slow tests/crosscheck
set -euo pipefail
cd "$(dirname "$0")"
PYTHON=${PYTHON:-python3}
test -x .venv/bin/python || "$PYTHON" -m venv .venv
install() { .venv/bin/python -m pip install --quiet --disable-pip-version-check "$@"; }
install torch==2.13.0 --index-url "${TORCH_INDEX_URL:-https://download.pytorch.org/whl/cpu}"
install trl==1.16.0 transformers==5.19.0
# verl's own pins are for its servers and GPUs; what its formulas import is this.
install --no-deps verl==0.9.1
install "ray>=2.41" tensordict codetiming hydra-core omegaconf pandas pybind11 cachetools orjson
