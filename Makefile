PYTHON ?= python3
BIN := .venv/bin

.PHONY: install quickstart test lint peers
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

# Every container, read by engines we did not write, each in its own environment with pinned versions.
PEERS ?= .venv-peers
peers: install
	tests/peers/install.sh gptqmodel $(PEERS)/gptqmodel $(PYTHON)
	tests/peers/install.sh llmcompressor $(PEERS)/llmcompressor $(PYTHON)
	tests/peers/install.sh llamacpp $(PEERS)/llamacpp $(PYTHON)
	$(BIN)/python tests/peers/matrix.py $(PEERS)
	PEERS=$(PEERS) $(BIN)/pytest -m slow tests/test_formats_peers.py
