#!/usr/bin/env bash
# The tests of everything that touches transformers, on the oldest release that pyproject.toml allows. The newest is what
# `make test` runs on. Only transformers and its hub client are put in front of what .venv has.
set -euo pipefail
cd "$(dirname "$0")/.."
oldest=$(sed -n 's/.*"transformers>=\([0-9.]*\),.*/\1/p' pyproject.toml)
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
.venv/bin/python -m pip install --quiet --no-deps --target "$place" "transformers==$oldest" "huggingface-hub>=1.5,<2"
export PYTHONPATH="$place:src"
.venv/bin/python -c "import transformers; print('transformers', transformers.__version__)"
# Old releases use what newer torch warns about.
.venv/bin/python -m pytest -n 2 -W ignore::DeprecationWarning tests/models/test_{cache,capture,compat,load,mode,positions,prefill,save,stream,swap,twin}.py
