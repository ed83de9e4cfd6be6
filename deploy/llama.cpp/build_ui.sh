#!/usr/bin/env bash
# build_ui.sh PYTHON FOLDER [SOURCE]: builds llama.cpp's web UI with npm and puts it into FOLDER, unless the one of this
# version is there. SOURCE is llama.cpp's source as fetch_source.sh leaves it; without one it is fetched. Takes a minute or
# two, and 600 MB in a temporary folder. Fails, and leaves FOLDER as it is, where npm is missing or npm's registry is.
set -euo pipefail
PY=$1 FOLDER=$2 SOURCE=${3:-}
HERE=$(cd "$(dirname "$0")" && pwd)
VERSION=$(sed -n 's/^VERSION = "\([0-9.]*\)".*/\1/p' "$HERE/../../towerd/llama_build.py")
STAMP=of-version  # no file of the UI: the daemon does not send it

if [ "$(cat "$FOLDER/$STAMP" 2>/dev/null)" = "$VERSION" ]; then exit; fi
command -v npm >/dev/null || { printf 'The chat page is built with npm, and there is none here.\n' >&2; exit 1; }
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
if [ -z "$SOURCE" ]; then
  SOURCE=$WORK/source
  "$HERE/fetch_source.sh" "$PY" "$SOURCE" whole
fi
cp -R "$SOURCE/tools/ui" "$WORK/ui"
if ! (cd "$WORK/ui" && npm ci --no-audit --no-fund && npm run build) >"$WORK/log" 2>&1; then
  tail -n 20 "$WORK/log" >&2
  printf 'The chat page could not be built by npm %s.\n' "$(npm --version)" >&2
  exit 1
fi
find "$WORK/ui/dist" -type f \( -name '*.js' -o -name '*.css' -o -name '*.html' -o -name '*.svg' \) -exec gzip -9kn {} +
printf '%s\n' "$VERSION" >"$WORK/ui/dist/$STAMP"
"$PY" "$HERE/npm_licences.py" "$WORK/ui/node_modules" >"$WORK/ui/dist/LICENSES.txt"
[ -s "$WORK/ui/dist/LICENSES.txt" ]
mkdir -p "$(dirname "$FOLDER")"
rm -rf "$FOLDER"
mv "$WORK/ui/dist" "$FOLDER"
