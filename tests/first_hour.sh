#!/usr/bin/env bash
# first_hour.sh WHEEL [MODEL]: what a new user does, timed. Installs the wheel where no compiler is to be found, lists the models,
# chats by curl and in the chat page by a headless Chromium, has a model call a tool of the `openai` package, kills the
# daemon (SIGKILL), starts it again and continues the chat, whose beginning must come from the store. MODEL is what
# `towerd serve -m` takes, by default the bundled story model. PYTHON names an interpreter that has openai, playwright
# and pytest; TOWERD_SCREENSHOTS a folder that keeps the picture of the chat page.
set -euo pipefail
SECONDS_MAX=60  # from the wheel at hand to the resumed chat
HIDDEN=(cc c++ gcc g++ clang clang++ ld as make cmake ninja node npm)
HERE=$(cd "$(dirname "$0")" && pwd)

# In a mount namespace of its own, where the system lets one, these programs and libgomp cannot be run or loaded at all.
# Elsewhere they are only not on the daemon's PATH.
if [ "${1:-}" != --inside ] && unshare --map-root-user --mount true 2>/dev/null; then
  exec unshare --map-root-user --mount "$HERE/first_hour.sh" --inside "$@"
fi
if [ "$1" = --inside ]; then
  shift
  for file in $(for name in "${HIDDEN[@]}"; do type -ap "$name" || true; done) /usr/lib/*/libgomp.so.*; do
    [ ! -e "$file" ] || mount --bind /dev/null "$(realpath "$file")"
  done
fi
WHEEL=$(realpath "$1")
MODEL=${2:-}
BASE=$("${PYTHON:-python3}" -c 'import sys; print(sys.executable)')
CURL=$(command -v curl)
WORK=$(mktemp -d "${TMPDIR:-/tmp}/first-hour.XXXXXX")
CLIENT=("$BASE" "$HERE/support/first_hour.py")

finish() {
  local running
  running=$(jobs -pr)
  [ -z "$running" ] || kill -KILL $running 2>/dev/null || true
  wait 2>/dev/null
  rm -rf "$WORK"
}
trap finish EXIT
die() { printf 'first_hour: %s\n' "$*" >&2; cat "$WORK"/*.log >&2 2>/dev/null || true; exit 1; }

# Nothing of this machine's user: no settings, no models, no compiler.
CLEAN=(env -i "HOME=$WORK/home" "PATH=$WORK/venv/bin" LANG=C.UTF-8 "TMPDIR=$WORK")

now() { "$BASE" -c 'import time; print(time.time())'; }

# $1: what; the rest: a command, whose seconds are printed.
timed() {
  local what=$1 started
  started=$(now)
  shift
  "$@" || die "$what failed"
  "$BASE" -c "print(f'  {$(now) - $started:7.2f} s  $what')"
}

install() {
  "$BASE" -m venv "$WORK/venv"
  # Not CLEAN: pip keeps its index and its cache. A package without a wheel is an error, not a compilation.
  "$WORK/venv/bin/pip" install --quiet --disable-pip-version-check --only-binary :all: "$WHEEL" 2>"$WORK/pip.log"
}

examine() {
  "${CLEAN[@]}" towerctl doctor --store-dir "$WORK/store" --socket "$WORK/s.sock" >"$WORK/doctor.log" &&
    grep -q 'native kernels' "$WORK/doctor.log"
}

models() { "${CLEAN[@]}" towerd models >"$WORK/models.log" && grep -q stories "$WORK/models.log"; }

# $1: a name of its own; the rest: flags. Sets DAEMON and URL.
start() {
  local log=$WORK/$1.log
  : >"$log"
  "${CLEAN[@]}" towerd serve --port 0 --store-dir "$WORK/$1" "${@:2}" </dev/null >"$log" 2>&1 &
  DAEMON=$!
  for _ in $(seq 600); do
    URL=$(grep -oE -m1 'http://[0-9.]+:[0-9]+' "$log") &&
      "$CURL" --silent --fail --output /dev/null "$URL/health" && return
    kill -0 "$DAEMON" 2>/dev/null || return 1
    sleep 0.1
  done
  return 1
}

serve() { start chats ${MODEL:+-m "$MODEL"}; }

# Nothing of it gets to say a last word.
slay() {
  kill -KILL "$DAEMON"
  wait "$DAEMON" 2>/dev/null || true
}

chat_page() { "${CLIENT[@]}" chat-page "$URL" "$WORK" >"$WORK/page.log" 2>&1; }

# In a second daemon beside the first: the story model calls no tools.
tool_call() {
  local url=$URL template
  template=$("$WORK"/venv/bin/python -c 'import towerd, pathlib; print(pathlib.Path(towerd.__file__).parent / "data/templates/Qwen3.jinja")')
  "$WORK/venv/bin/python" "$HERE/support/first_hour.py" tool-model "$WORK/caller.gguf" &&
    start tools -m "$WORK/caller.gguf" --chat-template-file "$template" --ctx-size 8192 &&
    "${CLIENT[@]}" tool-call "$URL" >"$WORK/tool.log" 2>&1 || return 1
  slay
  URL=$url
}

# $1: the messages as JSON. The reply goes to answer.json, its headers to headers.
chat() {
  "$CURL" --silent --show-error --fail-with-body --max-time 60 -D "$WORK/headers" -o "$WORK/answer.json" \
    -H 'Content-Type: application/json' -d "{\"messages\": $1, \"max_tokens\": 24}" "$URL/v1/chat/completions"
}

# $1: live, hot, warm, cold or prefill: tokens of the last prompt.
reused() {
  "$BASE" -c 'import re, sys; print(re.search(rf"(?im)^x-towerd-reuse:.*\b{sys.argv[1]}=(\d+)", open(sys.argv[2]).read())[1])' \
    "$1" "$WORK/headers"
}

# The text of the answer, as JSON.
said() {
  "$BASE" -c 'import json, sys; print(json.dumps(json.load(open(sys.argv[1]))["choices"][0]["message"]["content"]))' \
    "$WORK/answer.json"
}

mkdir "$WORK/home"
STORY='Once upon a time there was a little girl named Lily. She loved to play outside with her dog. '
FIRST="{\"role\": \"system\", \"content\": \"$STORY$STORY$STORY$STORY\"}, {\"role\": \"user\", \"content\": \"What did Lily find?\"}"
BEGAN=$(now)

timed 'install the wheel and what it needs' install
timed 'towerctl doctor' examine
timed 'towerd models' models
timed 'towerd serve' serve
FIRST_DAEMON=$DAEMON
timed 'the first answer' chat "[$FIRST]"
[ "$(reused prefill)" -gt 0 ] || die 'the first answer evaluated nothing'
timed 'the chat page, and its picture' chat_page
timed 'a tool call by openai' tool_call
DAEMON=$FIRST_DAEMON
timed 'kill -9' slay
timed 'towerd serve, again' serve
timed 'the same chat, continued' chat "[$FIRST, {\"role\": \"assistant\", \"content\": $(said)}, {\"role\": \"user\", \"content\": \"And then?\"}]"
stored=$(($(reused hot) + $(reused warm)))
[ "$stored" -gt "$(reused prefill)" ] || die "of the chat $stored tokens came from the store, $(reused prefill) were evaluated"
printf '  of the prompt %d tokens came from the store, %d were evaluated\n' "$stored" "$(reused prefill)"

"$BASE" -c "
total = $(now) - $BEGAN
print(f'  {total:7.2f} s  in all; at most $SECONDS_MAX')
raise SystemExit(total > $SECONDS_MAX)"
