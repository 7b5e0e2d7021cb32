PYTHON ?= python3
BIN := .venv/bin

.PHONY: install quickstart test lint
install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt torch==2.13.0
	$(BIN)/pip install -q -c constraints.txt -e '.[serve,dev]'
	touch $@

quickstart: install
	$(BIN)/quantize run recipes/quickstart/recipe.yaml recipes/quickstart/model -o out/quickstart --overwrite

test: install lint
	$(BIN)/pytest

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
