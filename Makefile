# Bascule: `make help` lists the commands. Each builds the environment in .venv when it is missing or old.
SHELL := /bin/sh
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help run test check demo openapi docs migration sim nightly lock bench clean

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# An environment that lost its Python or its pip, or has an old one, is made anew.
VENV_WORKS := $(shell $(BIN)/python -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo yes)

# The lock files name every package with its hash and no index, so pip takes them from wherever it is set up to.
$(VENV)/.run: requirements.lock pyproject.toml $(if $(VENV_WORKS),,anew)
	@test -n "$(VENV_WORKS)" || rm -rf $(VENV)
	@test -n "$(VENV_WORKS)" || $(PYTHON) -m venv $(VENV) || { echo "make: $(PYTHON) has no venv module (Debian: apt install python3-venv)"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@touch $@

.PHONY: anew
anew:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		version=$$($(PYTHON) -c 'import sys; print("is %d.%d.%d" % sys.version_info[:3])' 2>/dev/null); \
		echo "Python 3.11 or newer is needed, $(PYTHON) $${version:-is missing}; make $(or $(firstword $(MAKECMDGOALS)),run) PYTHON=python3.12"; \
		exit 1; } >&2

$(VENV)/.dev: $(VENV)/.run requirements-dev.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-dev.lock
	@touch $@

run: $(VENV)/.run ## the service; without ANTHROPIC_API_KEY the demo against the built-in simulator
	@if [ -n "$$ANTHROPIC_API_KEY" ]; then exec $(BIN)/python -m app serve; else exec $(BIN)/python -m app demo; fi

demo: $(VENV)/.run ## a scripted session against the built-in simulator
	@exec $(BIN)/python -m app demo

check: $(VENV)/.dev ## ruff, mypy, import rules, openapi drift, scenario coverage
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m app openapi --check openapi.yaml
	$(BIN)/python scripts/scenarios.py --missing

test: check ## check, then every test
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

openapi: $(VENV)/.run ## write openapi.yaml from the app
	$(BIN)/python -m app openapi > openapi.yaml

docs: $(VENV)/.dev ## the documentation as a site, in build/site
	$(BIN)/python -m sphinx -q -W --keep-going -b html -c docs/site . build/site

migration: $(VENV)/.dev ## a new migration from the tables: make migration M="Add x to y"
	$(BIN)/python -m app migrate --revision "$(M)"

sim: $(VENV)/.dev ## seeded lives with crashes between effects: make sim SEED=1 RUNS=500
	$(BIN)/python -m tests.simulation $(if $(SEED),--seed $(SEED)) $(if $(RUNS),--runs $(RUNS))

nightly: $(VENV)/.dev ## 20,000 fresh seeds, then the long stories
	$(BIN)/python -m tests.simulation --runs 20000
	$(BIN)/python -m pytest -m nightly

lock: ## resolve the lock files again (needs uv)
	uv pip compile -q --python-version 3.11 --universal --generate-hashes --no-header --extra embedded --extra otel -o requirements.lock pyproject.toml
	uv pip compile -q --python-version 3.11 --universal --generate-hashes --no-header --extra embedded --extra otel --extra dev -c requirements.lock -o requirements-dev.lock pyproject.toml

bench: $(VENV)/.run ## what a call costs, alone and among 50 sessions
	$(BIN)/python -m bench.calls
	$(BIN)/python -m bench.calls --sessions 50 --calls 40

# Where the data directory lies in a home that others may not enter, root's database is behind a link; see
# docs/operating.md. Only folders that the service made, and that are ours, go with it.
clean: ## remove the environment and the demo's data
	@for link in .bascule/postgres .bascule/demo/postgres; do \
		target=$$(readlink $$link) || continue; \
		case "$$target" in /var/lib/bascule/*/*|/var/lib/bascule/.*) ;; \
			/var/lib/bascule/?*) test -O "$$target" && rm -rf "$$target";; esac; \
	done; true
	rm -rf $(VENV) .bascule
