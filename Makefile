# Everything sets itself up: `make run` and `make test` need Python 3.11+ and make, nothing else.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
PYTEST_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help run test soak check format wheel-smoke schema-snapshot figures system-packages clean

help:
	@echo "make run [ARGS=...]   the product on an embedded PostgreSQL: cron-ticks up ARGS"
	@echo "make test             every test"
	@echo "make check            formatting, lint, types, import contracts"
	@echo "make soak             the full-size proofs"
	@echo "make format           rewrite files as the formatter wants them"
	@echo "make wheel-smoke      the built wheel in an empty environment"
	@echo "make schema-snapshot  rewrite docs/reference/schema.sql after adding a migration"
	@echo "make figures          take all published figures anew: some hours on a quiet machine"

# Made anew when the project's dependencies change; a half-made or too old one is replaced.
$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=...")'
	@$(BIN)/python -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || rm -rf $(VENV)
	@test -d $(VENV) || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

run: $(VENV)/.installed
	@$(BIN)/cron-ticks up $(ARGS)

test: $(VENV)/.installed system-packages
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal $(PYTEST_ARGS)

soak: $(VENV)/.installed system-packages
	$(BIN)/python -m pytest -m soak --soak -s $(PYTEST_ARGS)

# Debian packages that some tests need; without them those tests skip and say so.
system-packages: $(VENV)/.installed
	@test -e $(VENV)/.system-packages || sh .ci/system-packages
	@touch $(VENV)/.system-packages

check: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

wheel-smoke: $(VENV)/.installed
	sh .ci/wheel-smoke $(BIN)/python

schema-snapshot: $(VENV)/.installed
	$(BIN)/python -m pytest tests/test_schema_snapshot.py --update-snapshot

figures: $(VENV)/.installed
	$(BIN)/python benchmarks/publish.py run
	$(BIN)/python benchmarks/publish.py write

clean:
	rm -rf $(VENV) dist .cache
