#!/usr/bin/env bash
# sdist.sh PYTHON FOLDER: builds the sdist of towerd into FOLDER, from it alone a wheel, and fails unless that has the files
# of the wheel in FOLDER, which wheel.sh built from the working copy. Both have the llama.cpp that was compiled for it.
set -euo pipefail
PY=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
FOLDER=$(cd "$2" && pwd)
HERE=$(cd "$(dirname "$0")" && pwd)
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT

rm -f "$FOLDER"/towerd-*.tar.gz
"$PY" -m venv "$WORK/venv"
"$WORK/venv/bin/pip" install --quiet --disable-pip-version-check build
"$WORK/venv/bin/python" -m build --sdist --outdir "$FOLDER" "$HERE/.." >"$WORK/log" || { cat "$WORK/log" >&2; exit 1; }
export TOWERD_LLAMA_CPP_BUILD=${TOWERD_LLAMA_CPP_BUILD:-$HERE/../build/llama.cpp}
"$HERE/wheel.sh" "$WORK/venv/bin/python" "$WORK/wheel" "$FOLDER"/towerd-*.tar.gz
names() { "$PY" -c 'import sys, zipfile; print(*sorted(zipfile.ZipFile(sys.argv[1]).namelist()), sep="\n")' "$1"; }
diff <(names "$FOLDER"/towerd-*.whl) <(names "$WORK"/wheel/towerd-*.whl) ||
  { printf 'The wheel of the sdist (>) has other files than that of the working copy (<).\n' >&2; exit 1; }
ls -sh "$FOLDER"/towerd-*.tar.gz
