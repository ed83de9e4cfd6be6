#!/usr/bin/env bash
# first_hour.sh WHEEL [MODEL]: what a new user does, timed. Installs the wheel where no compiler is on PATH, chats by curl,
# stops the daemon, starts it again and goes on with the chat, whose beginning must come from the store. MODEL is what
# `towerd serve -m` takes, by default the bundled story model; PYTHON names the interpreter.
set -euo pipefail
WHEEL=$(realpath "$1")
MODEL=${2:-}
SECONDS_MAX=60  # from the wheel at hand to the resumed chat
BASE=$("${PYTHON:-python3}" -c 'import sys; print(sys.executable)')
CURL=$(command -v curl)
WORK=$(mktemp -d "${TMPDIR:-/tmp}/first-hour.XXXXXX")
DAEMON=

finish() {
  [ -z "$DAEMON" ] || stop
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

start() {
  : >"$WORK/towerd.log"
  "${CLEAN[@]}" towerd serve ${MODEL:+-m "$MODEL"} --port 0 --store-dir "$WORK/store" --socket "$WORK/s.sock" \
    </dev/null >"$WORK/towerd.log" 2>&1 &
  DAEMON=$!
  for _ in $(seq 600); do
    URL=$(grep -oE -m1 'http://[0-9.]+:[0-9]+' "$WORK/towerd.log") &&
      "$CURL" --silent --fail --output /dev/null "$URL/health" && return
    kill -0 "$DAEMON" 2>/dev/null || return 1
    sleep 0.1
  done
  return 1
}

stop() {
  kill "$DAEMON"
  wait "$DAEMON" || true
  DAEMON=
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
timed 'towerd serve' start
timed 'the first answer' chat "[$FIRST]"
[ "$(reused prefill)" -gt 0 ] || die 'the first answer evaluated nothing'
timed 'stop' stop
timed 'towerd serve, again' start
timed 'the same chat goes on' chat "[$FIRST, {\"role\": \"assistant\", \"content\": $(said)}, {\"role\": \"user\", \"content\": \"And then?\"}]"
stored=$(($(reused hot) + $(reused warm)))
[ "$stored" -gt "$(reused prefill)" ] || die "of the chat $stored tokens came from the store, $(reused prefill) were evaluated"
printf '  of the prompt %d tokens came from the store, %d were evaluated\n' "$stored" "$(reused prefill)"
stop

"$BASE" -c "
total = $(now) - $BEGAN
print(f'  {total:7.2f} s  in all; at most $SECONDS_MAX')
raise SystemExit(total > $SECONDS_MAX)"
