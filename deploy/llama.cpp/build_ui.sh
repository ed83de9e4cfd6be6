#!/usr/bin/env bash
# build_ui.sh PYTHON FOLDER: builds llama.cpp's web UI with npm and puts it into FOLDER. Its source is that inside the
# sdist of the llama-cpp-python that pyproject.toml pins. Takes a minute or two, and 600 MB in a temporary folder.
set -euo pipefail
PY=$1 FOLDER=$2
ROOT=$(cd "$(dirname "$0")/../.." && pwd)
VERSION=$(sed -n 's/^ *"llama-cpp-python==\([0-9.]*\)".*/\1/p' "$ROOT/pyproject.toml")
INSIDE=llama_cpp_python-$VERSION/vendor/llama.cpp/tools/ui

command -v npm >/dev/null || { printf 'The chat page is built with npm, and there is none here.\n' >&2; exit 1; }
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
"$PY" -m pip download --quiet --dest "$WORK" --no-deps --no-binary llama-cpp-python "llama-cpp-python==$VERSION"
mkdir "$WORK/ui"
tar -xzf "$WORK"/llama_cpp_python-*.tar.gz -C "$WORK/ui" --strip-components=5 "$INSIDE/"
if ! (cd "$WORK/ui" && npm ci --no-audit --no-fund && npm run build) >"$WORK/log" 2>&1; then
  tail -n 20 "$WORK/log" >&2
  exit 1
fi
find "$WORK/ui/dist" -type f \( -name '*.js' -o -name '*.css' -o -name '*.html' -o -name '*.svg' \) -exec gzip -9kn {} +
rm -rf "$FOLDER"
mkdir -p "${FOLDER%/*}"
mv "$WORK/ui/dist" "$FOLDER"
