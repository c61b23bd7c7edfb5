# Needs Python 3.11 or newer, gcc, make and pip's network; everything else is installed into .venv.
# Another interpreter: make PYTHON=/path/to/python3.12

.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help install check format test test-slow bench run docs clean model

IS_NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for name in python3 python3.11 python3.12 python3.13 python3.14; do \
	$$name -c '$(IS_NEW_ENOUGH)' 2>/dev/null && { echo $$name; break; }; done)
BIN := .venv/bin
STAMP := .venv/installed
QUICK := not slow and not gpu and not bench
WORKERS := 2
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt

help: ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' Makefile | expand -t 18

$(BIN)/python:
	@"$(PYTHON)" -c '$(IS_NEW_ENOUGH)' 2>/dev/null || { echo "cbgen needs Python 3.11 or newer;" \
	  "$(if $(PYTHON),$(PYTHON) is not,there is none on the PATH). Name one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) cannot make a virtual" \
	  "environment; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	"$(PYTHON)" -m venv --clear .venv || { rm -rf .venv; exit 1; }

# torch comes first and alone: asked for together with the rest, pip may prefer a build for CUDA of several gigabytes.
$(STAMP): pyproject.toml constraints.txt setup.py $(wildcard cbgen/csrc/*) | $(BIN)/python
	$(PIP) torch
	$(PIP) -e '.[gguf,dev]'
	@touch $@

install: $(STAMP) ## make .venv and install cbgen and its tools into it

model: install ## fetch the small real model into ~/.cache/cbgen
	@$(BIN)/python examples/fetch_smollm2.py

check: install ## ruff, ruff format, mypy, the import rule; prints what has become long
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/python -m pytest -q tests/test_imports.py
	@$(BIN)/python -m tests.helpers.print_sizes

format: install ## mend layout and import order
	$(BIN)/python -m ruff check --fix-only --quiet .
	$(BIN)/python -m ruff format .

test: check model ## the checks and every test that needs no GPU and no hub
	@failed=0; \
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations=30 -m '$(QUICK) and not serial' || failed=1; \
	$(BIN)/python -m pytest --durations=10 -m '$(QUICK) and serial' || failed=1; \
	exit $$failed

test-slow: model ## the tests that take longer
	$(BIN)/python -m pytest -m slow
	HYPOTHESIS_PROFILE=search $(BIN)/python -m pytest -m '$(QUICK)' $$(grep -rl '@given' tests)

bench: model ## what measures time and memory
	$(BIN)/python -m pytest -m bench -s tests $(wildcard benchmarks)

run: model ## answer examples/prompts.jsonl with the small model and print the first answers
	$(BIN)/cbgen run recipes/smollm2.yaml -i examples/prompts.jsonl -o out.jsonl --overwrite
	@$(BIN)/python examples/print_answers.py out.jsonl

docs: install ## write the generated pages of docs/ anew
	$(BIN)/python -m cbgen.recipe.describe > docs/recipe.md.new
	mv docs/recipe.md.new docs/recipe.md

clean: ## remove .venv, caches and what make run wrote
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist cbgen.egg-info cbgen/engine/cpu/_kernels.so
	rm -f out.jsonl out.jsonl.journal out.jsonl.run
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
