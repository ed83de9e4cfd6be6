#!/usr/bin/env bash
# fetch_source.sh PYTHON FOLDER: puts the parts of llama.cpp's source that towerd.wire compiles, includes and is tested
# with into FOLDER. It is the source inside the sdist of the llama-cpp-python that pyproject.toml pins.
set -euo pipefail
PY=$1 FOLDER=$2
ROOT=$(cd "$(dirname "$0")/../.." && pwd)
VERSION=$(sed -n 's/^ *"llama-cpp-python==\([0-9.]*\)".*/\1/p' "$ROOT/pyproject.toml")
PARTS=(common ggml/include include models/templates src/llama-grammar.h tools/mtmd tools/server vendor)
INSIDE=llama_cpp_python-$VERSION/vendor/llama.cpp

mkdir -p "${FOLDER%/*}"
WORK=$(mktemp -d "${FOLDER%/*}/fetching.XXXXXX")
trap 'rm -rf "$WORK"' EXIT
"$PY" -m pip download --quiet --dest "$WORK" --no-deps --no-binary llama-cpp-python "llama-cpp-python==$VERSION"
mkdir "$WORK/llama.cpp"
tar -xzf "$WORK"/llama_cpp_python-*.tar.gz -C "$WORK/llama.cpp" --strip-components=3 "${PARTS[@]/#/$INSIDE/}"
rm -rf "$FOLDER"
mv "$WORK/llama.cpp" "$FOLDER"
