# make pretrain   train the default model (ARGS="parallel=dp2 seed=1" adds settings)
# make test       run the test suite (ARGS="tests/pipeline -k gpipe" narrows it; ARGS="-m slow" runs the slow rest)
#
# Both make .venv when it is missing. PYTHON=python3.12 chooses the interpreter; PIP_ARGS adds arguments of pip install.

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
ARGS ?=
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install pretrain test lint typecheck format format-check clean

help:
	@sed -n 's/^# //p' Makefile

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed; try make PYTHON=python3.11")'
	@echo "installing into $(VENV) (once; torch is large)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP_ARGS) -e '.[test]'
	@touch $@

pretrain: $(STAMP)
	@$(BIN)/python recipes/pretrain.py $(ARGS)

# One thread per process: the tests start up to eight ranks of their own.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" --durations=15 $(ARGS)

format-check: $(STAMP)
	$(BIN)/ruff format --check .

lint: $(STAMP)
	$(BIN)/ruff check .

typecheck: $(STAMP)
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) dist build .pytest_cache .ruff_cache .mypy_cache .hypothesis
