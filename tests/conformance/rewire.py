"""A plugin for llama.cpp's server tests: the models that they would download are files here.

`run.py` makes the files, names them in the variables below, and loads this plugin.
"""

from __future__ import annotations

import os
import shutil
import sys
import types
from typing import Any

import pytest

MODELS = {
    "ggml-org/test-model-stories260K": "TOWERD_TEST_STORY",
    "ggml-org/test-model-stories260K-infill": "TOWERD_TEST_INFILL",
    "ggml-org/models": "TOWERD_TEST_STORY",
    "ggml-org/stories15M_MOE": "TOWERD_TEST_STORY",
    "ggml-org/tinygemma3-GGUF:Q8_0": "TOWERD_TEST_STORY",
}
"""Repository of a preset -> the variable that names the file which stands for it."""
VISION = "ggml-org/tinygemma3-GGUF:Q8_0"


DRAFT = "stories15M-q4_0.gguf"
"""A draft model, for which the story model stands, too."""


def _download(url: str, out: str, **_: Any) -> None:
    if not url.endswith(DRAFT):
        pytest.skip("needs a download")
    os.makedirs(os.path.dirname(out), exist_ok=True)
    shutil.copy(os.environ["TOWERD_TEST_STORY"], out)


wget = types.ModuleType("wget")
wget.download = _download  # type: ignore[attr-defined]
sys.modules["wget"] = wget


@pytest.fixture(scope="session", autouse=True)
def load_server_presets() -> None:
    """In place of the fixture that downloads all models."""
    return


def pytest_collection_modifyitems() -> None:
    import utils  # type: ignore[import-not-found]

    start = utils.ServerProcess.start

    def started(server: Any, timeout_seconds: int = 60) -> None:
        repo = server.model_hf_repo
        if repo is not None:
            if repo not in MODELS:
                pytest.skip(f"needs a download of {repo}")
            server.model_file = os.environ[MODELS[repo]]
            if repo == VISION:
                server.mmproj_url = None
                server.model_file = os.environ["TOWERD_TEST_STORY"]
                os.environ["LLAMA_ARG_MMPROJ"] = os.environ["TOWERD_TEST_PROJECTOR"]
            else:
                os.environ.pop("LLAMA_ARG_MMPROJ", None)
            if server.model_alias == "bert-bge-small" and server.pooling is None:
                server.pooling = "mean"
        server.model_hf_repo = server.model_hf_file = None
        start(server, timeout_seconds)

    utils.ServerProcess.start = started
    for server_test in list(utils.server_instances):
        server_test.stop()
