#!/usr/bin/env bash
# What a newcomer does, on a machine that has nothing of ours: a clone of what is committed, an empty home, a clean
# environment, new virtual environments. tools/fresh.py then runs what the README, getting-started and the demo show.
#
#   tools/fresh.sh           the whole; an hour or so
#   tools/fresh.sh --short   a short demo of the real model, and the tests of each extra with only that extra; minutes
#
# Only pip's own settings (PIP_*, certificates, proxies) are passed on: they say where packages come from.
set -euo pipefail
source=$(cd "$(dirname "$0")/.." && pwd)
python=$("${PYTHON:-python3}" -c 'import sys; print(sys.executable)') # the interpreter itself: a shim looks for a home
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/home"
if [ -e "$source/.git" ]; then
  git clone --quiet "$source" "$work/attngap"
else # an export, without history
  mkdir "$work/attngap"
  tar -C "$source" --exclude=./.venv -cf - . | tar -C "$work/attngap" -xf -
fi
settings=()
while IFS= read -r setting; do settings+=("$setting"); done < <(
  env | grep -E '^(PIP_[A-Z_]+|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE|[a-zA-Z]+_(proxy|PROXY))=' || true
)
cd "$work/attngap"
env -i HOME="$work/home" PATH="$PATH" LC_ALL=C.UTF-8 ${settings[@]+"${settings[@]}"} "$python" tools/fresh.py "$@"
