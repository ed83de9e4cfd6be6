#!/usr/bin/env bash
# arm64.sh PYTHON: runs towerd for Linux on arm64 under qemu-user: the kernels' tests, blobs against those of this machine,
# a chat that is killed and continued. Everything is cross-compiled; it takes half an hour on two cores and 3 GB in build/arm64.
# As root on Debian: apt install qemu-user-static binfmt-support g++-aarch64-linux-gnu debootstrap curl. PYTHON is a 3.11 with
# cmake, ninja, nanobind and what towerd needs: the one of `make setup`.
set -euo pipefail
[ -n "${IN_MOUNTS_OF_ITS_OWN:-}" ] || IN_MOUNTS_OF_ITS_OWN=1 exec unshare --mount "$0" "$@"  # they end with it
TRIPLE=aarch64-linux-gnu PORT=18440
BIN=$(cd "$(dirname "$1")" && pwd) PY=$(realpath -s "$1")
cd "$(dirname "$0")/.."
FOLDER=$PWD/build/arm64 ROOT=$PWD/build/arm64/root
export PATH="$BIN:$PATH"

step() { printf '%4d s  %s\n' $SECONDS "$1"; }
enter() {
  exec chroot "$ROOT" env HOME=/root XDG_RUNTIME_DIR=/tmp PYTHONPATH=/towerd:/towerd/tests/support:/towerd/towerd/lib \
    LLAMA_CPP_LIB_PATH=/towerd/towerd/lib sh -c 'cd /towerd && exec "$@"' sh "$@"
}
inside() { (enter "$@"); }

step "a Debian for arm64"
mkdir -p "$FOLDER"
binfmt=/proc/sys/fs/binfmt_misc  # where systemd has not mounted it, nothing is registered either
mountpoint -q "$binfmt" || mount -t binfmt_misc binfmt_misc "$binfmt"
[ -e "$binfmt/qemu-aarch64" ] || update-binfmts --enable qemu-aarch64
if [ ! -x "$ROOT/venv/bin/python" ]; then
  debootstrap --arch=arm64 --variant=minbase --include=python3,python3-venv,libpython3-dev,libgomp1,libstdc++6,ca-certificates \
    bookworm "$ROOT" >"$FOLDER/debootstrap.log"
  sed -n '/^dependencies = \[/,/^\]/s/^    "\([^";]*\)",.*/\1/p' pyproject.toml >"$FOLDER/packages"  # those for arm64, too
  printf '%s\n' pytest pytest-aiohttp pytest-asyncio pytest-timeout pytest-xdist hypothesis requests diskcache jinja2 >>"$FOLDER/packages"
  platforms=()
  for glibc in 2_17 2_26 2_28 2_31 2_34; do platforms+=(--platform "manylinux_${glibc}_aarch64"); done
  pip download --quiet --dest "$ROOT/wheels" "${platforms[@]}" --platform manylinux2014_aarch64 --only-binary=:all: \
    --python-version 3.11 --implementation cp --requirement "$FOLDER/packages"
  chroot "$ROOT" python3 -m venv /venv
  chroot "$ROOT" sh -c '/venv/bin/pip install --quiet --no-index --find-links /wheels /wheels/*'
fi
mount --bind /proc "$ROOT/proc"
mount --bind /dev "$ROOT/dev"

step "llama.cpp"
cat >"$FOLDER/toolchain.cmake" <<CMAKE
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER $TRIPLE-gcc)
set(CMAKE_CXX_COMPILER $TRIPLE-g++)
CMAKE
cross=(-G Ninja -DCMAKE_TOOLCHAIN_FILE="$FOLDER/toolchain.cmake" -DCMAKE_BUILD_TYPE=Release)
deploy/llama.cpp/fetch_source.sh "$PY" "$FOLDER/llama.cpp/source" whole
cmake -S "$FOLDER/llama.cpp/source" -B "$FOLDER/llama.cpp/build" "${cross[@]}" -DBUILD_SHARED_LIBS=ON -DGGML_NATIVE=OFF \
  -DGGML_CPU_ARM_ARCH=armv8.2-a+dotprod+fp16 -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF \
  -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DCMAKE_BUILD_WITH_INSTALL_RPATH=ON \
  -DCMAKE_PLATFORM_NO_VERSIONED_SONAME=ON '-DCMAKE_INSTALL_RPATH=$ORIGIN' >"$FOLDER/llama.cpp.log"
cmake --build "$FOLDER/llama.cpp/build" --target llama-common mtmd >>"$FOLDER/llama.cpp.log"
mkdir -p "$FOLDER/llama.cpp/lib/llama_cpp"
cp "$FOLDER"/llama.cpp/build/bin/lib*.so "$FOLDER/llama.cpp/lib"
cp "$FOLDER"/llama.cpp/source/llama_cpp/*.py "$FOLDER/llama.cpp/lib/llama_cpp"

step "towerd"
mkdir -p "$FOLDER/include/$TRIPLE"  # Python's headers without the other ones of that Debian
ln -sfn "$ROOT/usr/include/$TRIPLE/python3.11" "$FOLDER/include/$TRIPLE/python3.11"
TOWERD_LLAMA_CPP_BUILD="$FOLDER/llama.cpp" cmake -S . -B "$FOLDER/towerd" "${cross[@]}" -DPython_EXECUTABLE="$BIN/python" \
  -DPython_INCLUDE_DIR="$ROOT/usr/include/python3.11" "-DCMAKE_CXX_FLAGS=-I$FOLDER/include" >"$FOLDER/towerd.log"
cmake --build "$FOLDER/towerd" >>"$FOLDER/towerd.log"
rm -rf "$ROOT/towerd"
mkdir "$ROOT/towerd"
git ls-files -z | xargs -0 cp --parents --no-dereference -t "$ROOT/towerd"
cmake --install "$FOLDER/towerd" --prefix "$FOLDER/installed" >>"$FOLDER/towerd.log"
cp -r "$FOLDER/installed/towerd/lib" "$ROOT/towerd/towerd/lib"
ln -s .. "$ROOT/towerd/towerd/lib/llama_cpp/lib"  # where tests look for ggml's libraries
for module in kernels/_native wire/_wire; do  # named after the Python that CMake has asked
  cp "$FOLDER/installed/towerd/$module".*.so "$ROOT/towerd/towerd/$module.cpython-311-$TRIPLE.so"
done

step "the kernels' tests"
# Not: what /proc/cpuinfo says, which is the other CPU's; the codes of numbers that are too small for a scale, where ggml
# converts infinite numbers to integers, which C leaves open.
tiny='1e-37 or 1e-38 or 1e-40 or 1e-42 or 1e-45'
inside /venv/bin/python -m pytest -q -n 2 tests/kernels --ignore tests/kernels/fuzz --ignore tests/kernels/test_block_fuzz.py \
  -k "not (is_what_the_cpu_has or (writes_what_ggml_writes and ($tiny)))"

step "blobs"
rm -rf "$ROOT/blobs" "$FOLDER/blobs"
"$PY" tests/support/arm64_blobs.py README.md "$FOLDER/blobs"
inside /venv/bin/python tests/support/arm64_blobs.py README.md /blobs
diff -r "$FOLDER/blobs" "$ROOT/blobs"

step "a chat, killed and continued"
serve() {
  enter /venv/bin/python -m towerd serve -m stories --port $PORT --store-dir /store --socket /tmp/towerd.sock &
  SERVER=$!
  until curl -sf "localhost:$PORT/health" >/dev/null; do kill -0 $SERVER; sleep 0.2; done
}
ask() {
  curl -sf "localhost:$PORT/v1/chat/completions" -d '{"max_tokens": 24, "temperature": 0, "messages":
    [{"role": "user", "content": "Tell me of a small dog that found a red ball in the garden and took it home to the cat."}]}'
}
rm -rf "$ROOT/store"
serve
trap 'kill -9 $SERVER 2>/dev/null || true' EXIT
first=$(ask)
until curl -sf "localhost:$PORT/metrics" | grep -q '^towerd_warm_bytes [1-9]'; do sleep 0.2; done  # its rows are on disk
kill -9 $SERVER
wait $SERVER 2>/dev/null || true
serve
second=$(ask)
"$PY" - "$first" "$second" <<'CHECK'
import json, sys
first, second = map(json.loads, sys.argv[1:])
assert first["choices"][0]["message"] == second["choices"][0]["message"], (first, second)
cached, n = second["timings"]["cache_n"], second["usage"]["prompt_tokens"]
assert cached == n - 1, (cached, n)
print(f"{cached} of {n} tokens from the store, and the same answer")
CHECK
step "done"
