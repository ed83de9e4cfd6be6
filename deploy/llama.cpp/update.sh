#!/usr/bin/env bash
# update.sh PYTHON: moves to the newest llama-cpp-python of the package index, or to VERSION, and tries it: sets .venv up with
# it, has every architecture and llama.cpp's own server tests run, and lists what changed. What make update-llama-cpp runs.
set -euo pipefail
PY=$1
HERE=$(cd "$(dirname "$0")" && pwd)
cd "$HERE/../.."
PIN=towerd/llama_build.py
OLD=$(sed -n 's/^VERSION = "\([0-9.]*\)".*/\1/p' $PIN)
SOURCES=build/update

say() { printf '%s\n' "$*"; }
die() { printf 'make update-llama-cpp: %s\n' "$*" >&2; exit 1; }

newest() {
  "$PY" -m pip index versions llama-cpp-python 2>/dev/null | sed -n '1s/^llama-cpp-python (\(.*\))$/\1/p'
}

NEW=${VERSION:-$(newest)}
[ -n "$NEW" ] || die "the package index names no version of llama-cpp-python; VERSION=0.3.36 names one."
[[ $NEW =~ ^[0-9]+(\.[0-9]+)+$ ]] || die "$NEW is no version."
if [ "$NEW" = "$OLD" ]; then
  say "towerd has llama-cpp-python $OLD already."
  exit
fi
[ "$(printf '%s\n' "$OLD" "$NEW" | sort -V | tail -n 1)" = "$NEW" ] ||
  die "$NEW is older than $OLD, which towerd has: stored states are read as that one writes them."

move_to() { sed -i.before "s/^VERSION = \".*\"/VERSION = \"$1\"/" $PIN && rm $PIN.before; }

"$HERE/fetch_source.sh" "$PY" "$SOURCES/$OLD" whole
move_to "$NEW"
if ! "$HERE/fetch_source.sh" "$PY" "$SOURCES/$NEW" whole; then
  move_to "$OLD"
  die "the source of llama-cpp-python $NEW could not be fetched; nothing was changed."
fi

say "llama-cpp-python $OLD -> $NEW"
"$PY" "$HERE/changes.py" "$SOURCES/$OLD" "$SOURCES/$NEW"
make setup || die "towerd cannot be built with it yet. git checkout $PIN && make setup takes it back."
for task in architectures conformance; do
  make $task || die "make $task failed; all that was done before it is kept. git checkout $PIN docs && make setup takes it back."
done
git --no-pager diff --stat -- docs/models.md docs/conformance.md
git --no-pager diff --unified=0 -- docs/models.md docs/conformance.md
say "The tests of make test-all are next."
