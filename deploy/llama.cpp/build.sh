#!/usr/bin/env bash
# build.sh PYTHON FOLDER: builds the llama.cpp that a wheel of towerd carries, for all CPUs of this architecture. FOLDER/lib
# gets libraries, llama-server, and llama-cpp-python's declarations of the functions; FOLDER/ui the chat page, where there
# is npm; the source is left in FOLDER/source. A second call builds what has changed.
# TOWERD_CMAKE_ARGS is given to CMake as well (-DGGML_CUDA=ON); CMAKE_BUILD_PARALLEL_LEVEL limits the compilers.
set -euo pipefail
PY=$1
mkdir -p "$2"
FOLDER=$(cd "$2" && pwd)
HERE=$(cd "$(dirname "$0")" && pwd)
MODULES=(__init__ _ctypes_extensions llama_cpp)

args=(-G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DGGML_NATIVE=OFF -DLLAMA_BUILD_TESTS=OFF
  -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF
  -DCMAKE_BUILD_WITH_INSTALL_RPATH=ON -DCMAKE_PLATFORM_NO_VERSIONED_SONAME=ON)  # a wheel has no symbolic links
if [ "$(uname -s)" = Darwin ]; then
  args+=(-DGGML_METAL=ON -DGGML_METAL_EMBED_LIBRARY=ON -DCMAKE_INSTALL_RPATH=@loader_path)
else
  # One library for each generation of CPUs, of which the best that runs is loaded.
  args+=(-DGGML_BACKEND_DL=ON -DGGML_CPU_ALL_VARIANTS=ON '-DCMAKE_INSTALL_RPATH=$ORIGIN'
    "-DCMAKE_CXX_FLAGS=-include \"$HERE/gcc_amx.h\"")
fi
read -ra more <<<"${TOWERD_CMAKE_ARGS:-}"

"$HERE/fetch_source.sh" "$PY" "$FOLDER/source" whole
rm -f "$FOLDER/build/CMakeCache.txt"  # or an argument that is gone would stay in force
cmake -S "$FOLDER/source" -B "$FOLDER/build" "${args[@]}" ${more[@]+"${more[@]}"}
cmake --build "$FOLDER/build" --target llama-server

rm -rf "$FOLDER/lib"
mkdir -p "$FOLDER/lib/llama_cpp"
find "$FOLDER/build/bin" -type f \( -name 'lib*.so' -o -name 'lib*.dylib' -o -name llama-server \) \
  -exec cp {} "$FOLDER/lib" \;
for name in "${MODULES[@]}"; do
  cp "$FOLDER/source/llama_cpp/$name.py" "$FOLDER/lib/llama_cpp"
done
cp "$FOLDER/source/LICENSE" "$FOLDER/lib/llama.cpp.LICENSE"
cp "$FOLDER/source/LICENSE.md" "$FOLDER/lib/llama_cpp/LICENSE.md"

if ! "$HERE/build_ui.sh" "$PY" "$FOLDER/ui" "$FOLDER/source"; then
  rm -rf "$FOLDER/ui"  # that of another llama.cpp, which no wheel may get
  printf 'This build goes without the chat page.\n' >&2
fi
