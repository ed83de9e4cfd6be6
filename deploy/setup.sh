#!/usr/bin/env bash
# `make setup`: a .venv with everything in it. Each step is skipped while what it depends on is
# unchanged, so that a second run takes a second or two.
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=$PWD/.venv
PY=$VENV/bin/python
STAMPS=$VENV/.towerd
LLAMA_VERSION=$(sed -n 's/^VERSION = "\([0-9.]*\)".*/\1/p' towerd/llama_build.py)
LOG=$VENV/llama-build.log
SOURCE=$VENV/src/llama.cpp

say() { printf '%s\n' "$*"; }
die() { printf 'make setup: %s\n' "$*" >&2; exit 1; }

# $1: a file of $STAMPS, $2: what it has to say.
is_stamped() { [ -f "$STAMPS/$1" ] && [ "$(cat "$STAMPS/$1")" = "$2" ]; }

# What was built is whole but cannot run here: NVIDIA's driver is no part of the toolkit. $1: what a program said.
lacks_driver() { grep -q 'libcuda\.so\.1: cannot open' "$1"; }

# $1: a file of $STAMPS, $2: what it says: that this much was built, so that it is not built again when the driver is there.
die_without_driver() {
  printf '%s' "$2" >"$STAMPS/$1"
  die "a CUDA build was made, and this machine has no NVIDIA driver (libcuda.so.1 is missing): install the driver, or run on a machine with one, and nothing is compiled again; TOWERD_CMAKE_ARGS= make setup builds without CUDA."
}

site() { "$PY" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

# $1: interpreter. True if it is at least 3.11.
new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
  local name
  for name in "${PYTHON:-python3}" python3 python3.13 python3.12 python3.11; do
    if new_enough "$name"; then printf '%s' "$name"; return; fi
  done
  die "Python 3.11 or newer is needed; name it with PYTHON=/path/to/python3."
}

make_venv() {
  if [ ! -x "$PY" ]; then
    local python
    python=$(find_python)
    say "Creating .venv with $("$python" --version)"
    "$python" -m venv "$VENV" || die "python3 -m venv failed (Debian: apt install python3-venv)."
  fi
  new_enough "$PY" || die ".venv holds a Python older than 3.11: remove .venv and run again."
  mkdir -p "$STAMPS"
}

need_tools() {
  command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null ||
    die "a C++ compiler is needed (Debian: apt install g++; macOS: xcode-select --install)."
  # Before 25.1 pip does not know --group.
  if ! "$PY" -m pip install --help | grep -q -- --group; then
    "$PY" -m pip install --quiet --upgrade 'pip>=25.1'
  fi
  local missing=()
  command -v cmake >/dev/null || [ -x "$VENV/bin/cmake" ] || missing+=(cmake)
  command -v ninja >/dev/null || [ -x "$VENV/bin/ninja" ] || missing+=(ninja)
  [ ${#missing[@]} -eq 0 ] || "$PY" -m pip install --quiet "${missing[@]}"
}

# --- llama.cpp: the library and llama-server, from one llama-cpp-python build ------------------

llama_cmake_args() {
  local args="-DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=ON -DLLAMA_BUILD_SERVER=ON"
  args+=" -DLLAMA_TOOLS_INSTALL=ON -DLLAMA_USE_PREBUILT_UI=OFF"
  if [ "$(uname -s)" = Darwin ]; then
    args+=" -DGGML_METAL=ON '-DCMAKE_INSTALL_RPATH=@loader_path/../lib'"
  else
    args+=" '-DCMAKE_INSTALL_RPATH=\$ORIGIN/../lib'"
    # Without it GCC 12 and older miscompile llama.cpp on CPUs with AMX; see the header.
    args+=" '-DCMAKE_CXX_FLAGS=-include \"$PWD/deploy/llama.cpp/gcc_amx.h\"'"
  fi
  printf '%s' "$args$(cat "$STAMPS/cmake-args" 2>/dev/null)"
}

# TOWERD_CMAKE_ARGS="-DGGML_CUDA=ON" is remembered, so that the next `make serve` does not compile again without it.
remember_cmake_args() {
  [ -z "${TOWERD_CMAKE_ARGS+given}" ] || printf '%s' "${TOWERD_CMAKE_ARGS:+ $TOWERD_CMAKE_ARGS}" >"$STAMPS/cmake-args"
}

# Turns ninja's "[12/268] ..." lines into one line that moves, or into a line per 10 % in a log.
show_progress() {
  local line n total percent shown=-10
  while IFS= read -r line; do
    [[ $line =~ \[([0-9]+)/([0-9]+)\] ]] || continue
    n=${BASH_REMATCH[1]} total=${BASH_REMATCH[2]}
    [ "$total" -ge 20 ] || continue  # CMake's own little checks
    percent=$((100 * n / total))
    if [ -t 1 ]; then
      printf '\r  compiling llama.cpp: %d of %d (%d %%) ' "$n" "$total" "$percent"
    elif [ $percent -ge $((shown + 10)) ]; then
      printf '  compiling llama.cpp: %d of %d (%d %%)\n' "$n" "$total" "$percent"
      shown=$percent
    fi
  done
  if [ -t 1 ]; then printf '\n'; fi
}

# What llama.cpp is compiled for: the instructions of this CPU.
cpu_features() {
  if [ "$(uname -s)" = Darwin ]; then
    sysctl -n machdep.cpu.brand_string
  else
    grep -m1 -iE '^(flags|features)' /proc/cpuinfo || uname -m
  fi
}

# Where pip keeps the wheel that it builds: beside its other ones, apart for each CPU and set of flags, so that another
# clone need not compile it again. A home directory may move to another machine, and pip itself asks for the version alone.
wheel_cache() {
  local cache args
  cache=$("$PY" -m pip cache dir 2>/dev/null) || return 0
  args=$(llama_cmake_args)
  printf '%s/llama-cpp-python-%s' "$cache" \
    "$({ cpu_features; printf '%s' "${args//"$PWD"/}"; cat deploy/llama.cpp/gcc_amx.h; } | cksum | tr -d ' ')"
}

# $1: pip's cache, empty for none.
build_llama() {
  local started=$SECONDS options=(--no-cache-dir)
  [ -z "$1" ] || options=(--cache-dir "$1")
  say "Compiling llama.cpp and llama-server once; this takes 5 to 10 minutes on two cores."
  say "  (everything the compiler says goes to ${LOG#"$PWD"/})"
  if ! CMAKE_ARGS=$(llama_cmake_args) PATH="$VENV/bin:$PATH" \
    "$PY" -m pip install --verbose --force-reinstall --no-deps --no-binary llama-cpp-python \
    "${options[@]}" "llama-cpp-python==$LLAMA_VERSION" 2>&1 | tee "$LOG" | show_progress; then
    tail -n 30 "$LOG" >&2
    die "llama.cpp did not compile; the whole output is in $LOG."
  fi
  say "  done in $((SECONDS - started)) s"
}

llama_installed() {
  [ -x "$(site)/bin/llama-server" ] && [ -d "$(site)/llama_cpp_python-$LLAMA_VERSION.dist-info" ]
}

install_llama() {
  local wanted
  wanted="$LLAMA_VERSION $(llama_cmake_args) $(cpu_features | cksum)"
  is_stamped llama "$wanted" && llama_installed && return
  if is_stamped llama-untried "$wanted" && llama_installed; then
    try_llama "$wanted"
  elif [ ! -f "$STAMPS/llama" ] && llama_installed && llama_works; then
    say "Found a llama-cpp-python $LLAMA_VERSION with llama-server in .venv: keeping it."
  else
    build_llama "$(wheel_cache)"
    llama_works || lacks_driver "$STAMPS/probe.log" ||
      build_llama ""  # a wheel of pip's cache may be of another compiler
    llama_installed || die "the build has no llama-server in it; see $LOG."
    try_llama "$wanted"
  fi
  printf '%s' "$wanted" >"$STAMPS/llama"
}

# $1: what was built
try_llama() {
  rm -f "$STAMPS/llama-untried"
  llama_works && return
  ! lacks_driver "$STAMPS/probe.log" || die_without_driver llama-untried "$1"
  die "llama.cpp was built but cannot multiply quantized matrices on this CPU: $(tail -n 1 "$STAMPS/probe.log") (all of it is in $STAMPS/probe.log)"
}

# Runs a quantized random model through the new build: a miscompiled one dies here, not later.
llama_works() {
  local model status=0
  : >"$STAMPS/probe.log"
  "$PY" -m pip install --quiet "llama-cpp-python==$LLAMA_VERSION" gguf numpy platformdirs || return 1
  model=$(mktemp -d)
  PYTHONPATH=$PWD "$PY" - "$model/probe.gguf" <<'PROBE' || return 1
import sys
from pathlib import Path
from lab.models.random_gguf import Shape, make_random_gguf

make_random_gguf(Path(sys.argv[1]), Shape(1, 256, 4, 2, 512, 512, n_ctx_train=512))
PROBE
  # In a shell of its own, so that bash does not report the crash that is looked for.
  bash -c '"$@"; exit $?' probe "$(site)/bin/llama-bench" -m "$model/probe.gguf" -p 64 -n 4 -r 1 \
    >"$STAMPS/probe.log" 2>&1 || status=$?
  rm -rf "$model"
  [ $status -eq 0 ]
}

# --- the source of that build, against which towerd.wire is compiled ----------------------------

fetch_source() {
  local wanted fetch=deploy/llama.cpp/fetch_source.sh
  wanted="$LLAMA_VERSION $(cksum <"$fetch")"
  is_stamped source "$wanted" && [ -d "$SOURCE" ] && return
  say "Fetching the source of llama-cpp-python $LLAMA_VERSION"
  "$fetch" "$PY" "$SOURCE" || die "the source of llama-cpp-python $LLAMA_VERSION could not be fetched."
  printf '%s' "$wanted" >"$STAMPS/source"
}

# --- towerd itself -----------------------------------------------------------------------------

install_project() {
  local wanted
  # The installation maps modules to files, so it is made again when there is another folder.
  wanted=$({
    find pyproject.toml CMakeLists.txt kernels/cpp towerd/wire/cpp "$STAMPS/llama" "$STAMPS/source" -type f |
      LC_ALL=C sort | tr '\n' '\0' | xargs -0 cat
    find -L towerd -name __pycache__ -prune -o -type d -print | LC_ALL=C sort
  } | cksum)
  is_stamped project "$wanted" && return
  if ! is_stamped project-untried "$wanted"; then
    say "Installing towerd and its development tools into .venv"
    "$PY" -m pip install --quiet --group build --group dev
    PATH="$VENV/bin:$PATH" "$PY" -m pip install --quiet --no-build-isolation --editable .
  fi
  try_wire "$wanted"
  printf '%s' "$wanted" >"$STAMPS/project"
}

# $1: what was built
try_wire() {
  local log=$STAMPS/wire.log status=0
  rm -f "$STAMPS/project-untried"
  # In a shell of its own, as above.
  bash -c '"$@"; exit $?' wire "$PY" -P -c 'import towerd.wire' 2>"$log" || status=$?
  [ $status -ne 0 ] || return 0
  ! lacks_driver "$log" || die_without_driver project-untried "$1"
  [ $status -lt 128 ] ||  # with a libstdc++ in each of its libraries, loading it crashes
    die "towerd.wire was built but crashes as it is loaded (status $status); a compiler that links libstdc++ statically does that: name another (CXX=g++), remove .venv and run again."
  die "towerd.wire was built but cannot be loaded: $(tail -n 1 "$log") (all of it is in $log)"
}

# --- the default model -------------------------------------------------------------------------

# Into the user's models directory, once. Where it cannot be had, the bundled story model is served
# and the next attempt is a day later.
fetch_model() {
  local wanted known path
  wanted=$(cksum <towerd/models/known.py)
  [ -f "$STAMPS/smollm2" ] && { read -r known && read -r path; } <"$STAMPS/smollm2" &&
    [ "$known" = "$wanted" ] && [ -f "$path" ] && return
  [ -z "$(find "$STAMPS" -name smollm2-missing -mmin -1440)" ] || return 0
  if path=$("$VENV/bin/towerd" models get smollm2 --timeout 60); then
    printf '%s\n%s\n' "$wanted" "$path" >"$STAMPS/smollm2"
    rm -f "$STAMPS/smollm2-missing"
  else
    say "Until then the bundled story model is served."
    touch "$STAMPS/smollm2-missing"
  fi
}

make_venv
remember_cmake_args
need_tools
install_llama
fetch_source
install_project
fetch_model
say "Ready: .venv/bin/towerd serve, .venv/bin/towerctl"
