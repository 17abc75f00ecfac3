#!/usr/bin/env bash
# An environment of its own for SGLang, which pins another torch than vLLM: .venv-sglang, for rollout.name=sglang.
#   bash environment/sglang.sh [FOLDER]        PYTHON (.venv/bin/python) is the Python that it is made with
#
# With an NVIDIA driver it is what SGLang's package asks for. Without one there is no build of SGLang's kernels in the
# package index. The environment then sees the packages of PYTHON's own (torch for a CPU, transformers), has SGLang
# without its requirements, and a stand-in for the kernels, whose functions raise: with the arguments of
# core/engines/sglang.py none of them is called. SGLang does not support that; it is for tests and the laptop tasks.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-.venv/bin/python}" folder="${1:-.venv-sglang}" version=0.5.23

"$python" -m venv --without-pip --clear "$folder"
install() { "$python" -m pip --python "$folder/bin/python" install --quiet "$@"; }
if command -v nvidia-smi > /dev/null; then
    install "sglang==$version"
    touch "$folder/.installed"
    exit
fi

site="$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
"$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$site/base.pth"
# ipython and what it needs is imported for a helper of notebooks, soundfile and gguf for other kinds of models
install --no-deps "sglang==$version" orjson==3.13.0 gguf==0.19.0 soundfile==0.14.0 torchvision==0.28.0 \
    ipython==9.18.1 ipython-pygments-lexers==1.1.1 traitlets==5.16.1 decorator==5.3.1 jedi==0.20.1 parso==0.8.7 \
    matplotlib-inline==0.2.2 pexpect==4.9.0 ptyprocess==0.7.0 prompt_toolkit==3.0.53 pygments stack_data==0.6.3 \
    executing==2.3.0 asttokens==3.0.2 pure_eval==0.2.4 wcwidth==0.9.4

mkdir -p "$site/sgl_kernel"
cat > "$site/sgl_kernel/__init__.py" << 'PYTHON'
"""Stands for SGLang's compiled kernels, which have no build for this machine: every function raises."""

__version__ = "0"


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise RuntimeError(f"sgl_kernel.{name} is a compiled kernel, which this environment does not have")

    return missing
PYTHON

# torchvision's operators are compiled for another torch; it is imported for the names of two of them.
cat > "$site/torchvision_operators.py" << 'PYTHON'
"""Declares torchvision's operators before torchvision is imported: without them its import fails."""

import sys


class BeforeTorchvision:
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            declared = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                declared.define(operator + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            sys.modules[__name__].declared = declared  # they last as long as this object


sys.meta_path.insert(0, BeforeTorchvision())
PYTHON
echo "import torchvision_operators" >> "$site/base.pth"
SGLANG_USE_CPU_ENGINE=1 "$folder/bin/python" -c 'import sglang; print("SGLang", sglang.__version__)' 2> /dev/null
touch "$folder/.installed"
