# Every target works first on a fresh machine: it makes `.venv` where needed.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# What `drystone` itself needs, and then what its tests, documents and engines need.
READY := $(VENV)/.ready
STAMP := $(VENV)/.setup-done
# Tests start hundreds of processes of ours: each would compile what it imports where PYTHONDONTWRITEBYTECODE is set.
COMPILE := $(BIN)/python -m compileall -q src
# Each test goes to whoever is free; those that share a cluster or a browser stay together. They come in the order of
# tests/conftest.py, the longest first.
PYTEST := $(BIN)/python -m pytest -n auto --dist loadgroup --no-loadscope-reorder

.DEFAULT_GOAL := help
NEEDS := llama-3.2-1b llama-3.2-3b llama-3.1-8b llama-3.3-70b qwen2.5-0.5b qwen2.5-1.5b qwen2.5-7b \
  qwen2.5-14b qwen2.5-32b qwen3-0.6b qwen3-4b qwen3-8b qwen3-14b qwen3-32b qwen3-30b-a3b mistral-7b-v0.3 \
  gemma-3-4b gemma-3-12b phi-4 gpt-oss-20b
.PHONY: needs help setup demo test fast check lint lock mutants faults bench tree reference docs clean browser slurm

help:  ## show the targets
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 18

setup: $(STAMP)  ## make .venv with everything

# Exactly what the lock says (locks/README.md), and nothing that a day's index would choose. torch is installed apart:
# which build that is, for CPU or CUDA, is the machine's affair.
$(READY): pyproject.toml locks/core.txt locks/torch.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Drystone needs Python 3.11 or newer: make PYTHON=/path/to/python setup" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing torch and what Drystone stands on: a minute or two."
	$(PIP) --no-deps --require-hashes --requirement locks/core.txt
	$(PIP) --constraint locks/torch.txt torch==2.13.0
	$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

$(STAMP): $(READY) locks/dev.txt
	@echo "Installing what the tests, linters, documents and engines need."
	$(PIP) --no-deps --require-hashes --requirement locks/dev.txt
	@touch $@

demo: $(READY)  ## the best of what there is, in the terminal
	$(BIN)/drystone demo
	@echo; echo "Last: a module of your own, traced without a GPU."
	$(BIN)/drystone estimate examples/my_module.py:build_model --gpu A100-80G --layout dp=8,micro=4,zero=3 --seq-len 2048
	@echo; echo "From here: source $(BIN)/activate, then docs/tutorial.md; drystone --help lists the commands."

lint: setup  ## format, style, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint fast  ## lint and the fast tests: before every commit

fast: setup  ## the tests that take less than two seconds each
	@$(COMPILE)
	$(PYTEST) -m "not slow"

# The page is tested in Debian's Chromium: where we may install it, we do; elsewhere those tests are skipped.
browser:
	@command -v chromium >/dev/null \
		|| { test "$$(id -u)" = 0 && apt-get update -qq && apt-get -o DPkg::Lock::Timeout=120 install -y -qq chromium >/dev/null; } \
		|| echo "There is no chromium here: the tests of the page are skipped." >&2

# Tests of the Slurm engine start daemons of their own; the packages come from Debian where we may install them.
slurm:
	@tests/engines/install_slurm.sh

# Nothing before the tests can stop them: style and types are `make lint`.
test: setup browser slurm  ## every test
	@$(COMPILE)
	$(PYTEST)

# QUICK=1: the short ones. ONLY=plan_time,wire: by name. DATA=DIR: with data that is not shipped. ARGS=--list: names.
bench: setup  ## measure everything and compare with the stated ranges: benchmarks/RESULTS.md
	@cd benchmarks && ../$(BIN)/python -m bench $(if $(QUICK),--quick) $(if $(ONLY),--only $(ONLY)) $(if $(DATA),--data $(abspath $(DATA))) $(ARGS)

# CONTRIBUTING.md says when.
lock:  ## write locks/ anew with the newest releases allowed, and say what changed
	@$(PYTHON) locks/renew.py

# SEEDS=0:10000 takes hours on two cores: a night. A seed that fails goes into FOUND of the test.
faults: setup  ## the controller, also one that rents, with faults by seed: SEEDS=0:1000
	DRYSTONE_FAULT_SEEDS=$(or $(SEEDS),0:10000) $(BIN)/python -m pytest -n auto -q tests/unit/run/control/test_simulated_*.py

# ARGS="--number 20 --seed 7 --only schedule/prices": others. Takes an hour on two cores: every mutant runs tests.
mutants: setup  ## change the pure stages a little, 200 times, and see that the fast tests notice
	@$(BIN)/python tests/mutation/mutate.py $(ARGS)

tree: setup  ## write the tree of files into ARCHITECTURE.md
	$(BIN)/python docs/architecture_tree.py

reference: setup  ## write docs/reference from the code
	$(BIN)/python docs/generate_reference.py

needs:  ## write the table of docs/needs.md anew
	sed -i '/^|/d' docs/needs.md
	$(BIN)/drystone table $(NEEDS) --gpus RTX-4090,L40S,A100-80G,H100,B200 >> docs/needs.md

docs: reference  ## make the site of docs/ in docs/_build/html
	$(BIN)/python -m sphinx -b html -W --keep-going -n -q docs docs/_build/html
	@echo "Open docs/_build/html/index.html"

clean:  ## remove .venv and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis dist docs/_build
