# Two commands do everything: `make demo` trains, `make test` checks. Both set up what they need.
PYTHON ?= python3
BIN := .venv/bin
# In the order of folders: by the number of their tests, files of one long test would come last.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
UV := .venv-tools/bin/uv
INSTALL := $(UV) pip install --quiet --python $(BIN)/python --no-deps

TORCH := 2.13.0$(if $(filter Linux,$(shell uname)),+cpu)

.PHONY: demo test test-quick test-all coverage docs methods numbers setup torch lint types unit benchmark-setup lock sbom clean

demo: setup  ## Train SimFBO on MNIST with the paper's settings and with few bytes; writes a folder under runs/
	$(BIN)/simfbo compare --config examples/demo.toml --or-digits --jobs 2

test: lint .venv/.torch  ## Everything that CI runs; types are checked while tests run
	@$(MAKE) --no-print-directory --jobs=2 types unit

test-quick: setup  ## The inner loop: the mathematics, configuration and files
	$(PYTEST) tests/core tests/engines tests/config tests/runs \
	  tests/datasets tests/studies tests/experiments tests/algorithms/test_simfbo.py

test-all: .venv/.torch lint types  ## All tests, those of benchmarks' code too, with XLA's usual emitters
	XLA_FLAGS= $(PYTEST) -m "" tests src benchmarks/*/test_*.py

coverage: .venv/.torch  ## Which lines the tests reach; writes coverage.xml
	$(PYTEST) --cov --cov-report=term:skip-covered --cov-report=xml

setup: .venv/.done

.venv/.done: pyproject.toml requirements.lock | $(UV)
	$(PYTHON) -m venv .venv
	$(INSTALL) --require-hashes --requirement requirements.lock
	$(INSTALL) --no-build-isolation --editable .
	touch $@

$(UV): requirements-uv.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "simfbo needs Python 3.11 or newer: run make PYTHON=/path/to/python3.11"; exit 2; }
	$(PYTHON) -m venv .venv-tools
	.venv-tools/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --requirement $<
	@touch $@

.venv/.torch: .venv/.done
	@$(PIP) --no-compile 'torch==$(TORCH)' 2>/dev/null || \
	  echo "pip finds no torch==$(TORCH) here: tests of simfbo.torch are skipped. 'make torch' installs the usual build."
	@touch $@

torch: setup  ## PyTorch's usual build, several GB on Linux, for the tests of simfbo.torch
	$(PIP) 'torch>=2.13'
	@touch .venv/.torch

lint: setup
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --quiet --check .
	@out=$$($(BIN)/lint-imports --no-logo 2>&1) || { echo "$$out"; exit 1; }  # layers of rooms
	@out=$$($(BIN)/deptry src 2>&1) || { echo "$$out"; exit 1; }  # declared dependencies

types: setup
	$(BIN)/basedpyright --level error

unit: .venv/.torch
	$(PYTEST)

docs: .venv/.docs  ## Build and check the documentation site: build/docs/index.html
	rm -rf build/docs
	$(BIN)/python docs/site/gather.py build/docs-source
	$(BIN)/python -m sphinx --jobs auto --quiet --fail-on-warning --keep-going --conf-dir docs/site \
	  --doctree-dir build/docs-source/doctrees build/docs-source/pages build/docs
	$(BIN)/python docs/site/check_html.py build/docs

.venv/.docs: .venv/.done requirements-docs.lock | $(UV)
	$(INSTALL) --require-hashes --requirement requirements-docs.lock
	@touch $@

methods: setup  ## Write docs/reference-methods.md from the catalogue, the ledger and the results
	$(BIN)/python docs/make_methods.py

numbers: setup  ## Write the numbers and dates of results into the documents that quote them
	$(BIN)/python docs/make_numbers.py

benchmark-setup: .venv/.torch  ## PyTorch and more, for comparisons of speed
	$(PIP) --no-build-isolation --editable '.[benchmark]'

UV_COMPILE := $(UV) pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes \
  --no-strip-extras --custom-compile-command 'make lock'

lock: $(UV)  ## Rebuild the lock files with the newest versions, by uv in .venv-tools
	echo uv | $(UV_COMPILE) --output-file requirements-uv.lock -
	$(UV_COMPILE) --extra dev --output-file requirements.lock pyproject.toml
	$(UV_COMPILE) --extra docs --constraint requirements.lock --output-file requirements-docs.lock pyproject.toml

sbom: setup  ## Write sbom.json (CycloneDX), the bill of the locked packages with their hashes
	$(BIN)/python -W ignore -m cyclonedx_py requirements --pyproject pyproject.toml --output-reproducible \
	  --output-format JSON --output-file sbom.json requirements.lock

clean:
	rm -rf .venv .venv-tools build sbom.json .pytest_cache .ruff_cache dist
