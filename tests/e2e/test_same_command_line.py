"""A llama-server command line given to towerd: the same replies, and rows of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import requests
from daemon import Daemon, reuse_of

from towerd.cli.bench.harness.servers import llama_server
from towerd.models.bundled import bundled_model

MakeDaemon = Callable[..., Daemon]
PROMPT = "Once upon a time there was a little girl who wanted"
BODY: dict[str, Any] = {"prompt": PROMPT, "n_predict": 24, "cache_prompt": True}
SAMPLING = (
    "--temp",
    "0.7",
    "--top-k",
    "5",
    "--min-p",
    "0.01",
    "--seed",
    "7",
    "--repeat-penalty",
    "1.2",
)
STRETCHED = ("--rope-scaling", "yarn", "--rope-scale", "4", "--yarn-orig-ctx", "128")
LOADING = (
    "--device",
    "none",
    "-ot",
    "blk=CPU",
    "--no-kv-offload",
    "--numa",
    "distribute",
    "-ncmoe",
    "1",
)
OVERRIDDEN = ("--override-kv", "llama.attention.layer_norm_rms_epsilon=float:0.01")


def content_of(url: str) -> str:
    reply = requests.post(url + "/completion", json=BODY, timeout=60)
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["content"]
    return text


def test_replies_are_llama_servers(make_daemon: MakeDaemon) -> None:
    """Defaults of sampling, RoPE, metadata and devices from the command line."""
    flags = (*SAMPLING, *STRETCHED, *LOADING, *OVERRIDDEN, "-fa", "off", "-c", "512", "-t", "1")
    with make_daemon("-m", str(bundled_model()), *flags) as daemon:
        found = content_of(daemon.url)
        defaults = daemon.get("/props")["default_generation_settings"]["params"]
    with llama_server(bundled_model(), *flags, "--no-warmup", "-np", "1") as server:
        assert content_of(server.url) == found
    assert defaults["top_k"] == 5
    assert defaults["seed"] == 7
    with make_daemon("-m", str(bundled_model()), *SAMPLING, "-fa", "off", name="plain") as daemon:
        assert content_of(daemon.url) != found


def test_rows_are_kept_apart(make_daemon: MakeDaemon) -> None:
    """What was computed with one RoPE or metadata is not used with another, nor lost."""
    reused = []
    for flags in ((), STRETCHED, OVERRIDDEN, (), STRETCHED, OVERRIDDEN):
        with make_daemon("--freeze-after", "-1", *flags) as daemon:
            reply = requests.post(
                daemon.url + "/completion", json=BODY | {"n_predict": 1}, timeout=60
            )
            reused.append(reuse_of(reply.headers)["warm"])
            assert daemon.stop() == 0, daemon.log
    assert reused[:3] == [0, 0, 0]
    assert min(reused[3:]) > 5


def test_a_value_that_llama_does_not_take(make_daemon: MakeDaemon) -> None:
    """One sentence, before anything is served."""
    daemon = make_daemon("-m", str(bundled_model()), "--device", "gpu9")
    daemon.spawn()
    assert daemon.wait() == 1
    assert "llama.cpp refuses a flag: --device: invalid device: gpu9." in daemon.log
