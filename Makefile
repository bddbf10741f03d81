# Two commands do everything: `make demo` trains, `make test` checks. Both set up what they need.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test setup lint types unit benchmark-setup clean

demo: setup  ## Train SimFBO on MNIST across 100 clients and write a folder under runs/
	$(BIN)/simfbo run --config examples/demo.toml --or-digits

test: setup lint types unit  ## Everything that CI runs

setup: .venv/.done

.venv/.done: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "simfbo needs Python 3.11 or newer: run make PYTHON=/path/to/python3.11"; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

lint: setup
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --quiet --check .

types: setup
	$(BIN)/basedpyright --level error

unit: setup
	$(BIN)/python -m pytest -n 2

benchmark-setup: setup  ## PyTorch, for benchmarks/round_speed only
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[benchmark]'

clean:
	rm -rf .venv .pytest_cache .ruff_cache dist
