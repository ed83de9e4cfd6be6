#!/usr/bin/env bash
# fetch_source.sh PYTHON FOLDER [whole]: puts the parts of llama.cpp's source that towerd.wire compiles, includes and is
# tested with into FOLDER; `whole`: all of it, with llama-cpp-python's own modules beside it. It is the source
# inside the sdist of the llama-cpp-python that towerd/llama_build.py names.
set -euo pipefail
PY=$1 FOLDER=$2
ROOT=$(cd "$(dirname "$0")/../.." && pwd)
VERSION=$(sed -n 's/^VERSION = "\([0-9.]*\)".*/\1/p' "$ROOT/towerd/llama_build.py")
PARTS=(common ggml/include include models/templates src/llama-grammar.h tools/mtmd tools/server vendor)
SDIST=llama_cpp_python-$VERSION
INSIDE=$SDIST/vendor/llama.cpp

if grep -qs "__version__ = \"$VERSION\"" "$FOLDER/llama_cpp/__init__.py"; then exit; fi
mkdir -p "${FOLDER%/*}"
WORK=$(mktemp -d "${FOLDER%/*}/fetching.XXXXXX")
trap 'rm -rf "$WORK"' EXIT
"$PY" -m pip download --quiet --dest "$WORK" --no-deps --no-binary llama-cpp-python "llama-cpp-python==$VERSION"
mkdir "$WORK/llama.cpp"
# With the time of now: the sdist's files are all of one moment in 2022, and ninja would compile none again.
unpack() { tar -xmzf "$WORK/$SDIST.tar.gz" -C "$WORK/llama.cpp" "$@"; }
if [ "${3:-}" = whole ]; then
  unpack --strip-components=3 "$INSIDE"
  unpack --strip-components=1 "$SDIST/llama_cpp" "$SDIST/LICENSE.md"
else
  unpack --strip-components=3 "${PARTS[@]/#/$INSIDE/}"
fi
rm -rf "$FOLDER"
mv "$WORK/llama.cpp" "$FOLDER"
