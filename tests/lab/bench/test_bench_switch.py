"""`bench switch` against a proxy that saves whole slots: a fair baseline, counted writes."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result

from lab.bench.slots.proxy import SlotProxy
from lab.models.random_gguf import PRESETS, make_random_gguf
from towerd.cli.bench.harness.client import complete, new_session
from towerd.cli.bench.harness.models import random_prompt, vocab_size
from towerd.cli.bench.switch import SwitchLoad, can_count_written, written_bytes
from towerd.engine.llama_server.process.binary import find_binary
from towerd.engine.llama_server.slot_files.slotdir import SlotDir
from towerd.errors import TowerdError

LAYERS = 2
ROW_BYTES = LAYERS * 2 * 2 * 64 * 2
"""Of one token: K and V of 2 heads of 64 in f16."""
SLOT_TOKEN_BYTES = 64
"""More than a slot file has for each token beside its rows."""
BASE, OWN, SAID, REPLY = 64, 32, 8, 6
FLAGS = ("-c", "256", "-np", "2", "-kvu", "-t", "1", "--no-warmup")
"""Of three chats one fits, with little to spare."""

SHM = Path("/dev/shm")
counted = pytest.mark.skipif(not can_count_written(), reason="what is written is not counted here")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, dense, 2 KV heads of 64."""
    try:
        find_binary()
    except TowerdError as error:
        pytest.skip(error.message)
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    make_random_gguf(path, replace(PRESETS["tiny"], n_layer=LAYERS))
    return path


def sizes(folder: Path) -> list[int]:
    return [file.stat().st_size for file in folder.iterdir()]


async def test_slot_proxy_goes_on_from_files(model: Path, tmp_path: Path) -> None:
    """Three chats in two slots, of which the cells hold one: every turn but the first of each is
    a restore, nothing known is evaluated again, also after a restart, and the replies are those
    of a llama-server that evaluates everything."""
    rng, n_vocab = np.random.default_rng(3), vocab_size(model)

    def said(n: int) -> list[int]:
        return list(random_prompt(rng, n, n_vocab).tolist())

    base = said(BASE)
    chats = [base + said(OWN) for _ in range(3)]
    proxy = SlotProxy(tmp_path)
    turns: list[tuple[list[int], list[int]]] = []
    evaluated: list[int] = []
    with proxy.server(model, *FLAGS) as server:
        for rounds in ((0, 1), (2,)):
            async with proxy.connect(server.url) as ask:
                for turn in rounds:
                    for i, history in enumerate(chats):
                        prompt = history + (said(SAID) if turn else [])
                        done = await ask(prompt, REPLY)
                        turns.append((prompt, done.tokens))
                        evaluated.append(done.timings["prompt_n"])
                        assert 0 < done.ttft_s <= done.last_token_s <= done.total_s
                        chats[i] = prompt + done.tokens
            server.stop()
            server.start()
    assert evaluated == [BASE + OWN, OWN, OWN] + [SAID + 1] * 6
    assert (len(proxy.restore_s), proxy.restores_missed) == (6, 0)
    assert len(proxy.save_s) == len(turns)
    n_slot_tokens = sum(len(prompt) + len(reply) - 1 for prompt, reply in turns)
    per_token = proxy.bytes_written / n_slot_tokens
    assert ROW_BYTES <= per_token <= ROW_BYTES + SLOT_TOKEN_BYTES
    found = sizes(tmp_path)
    assert len(found) == 3, "a chat continues in its own file"
    n_last = sum(len(chat) - 1 for chat in chats)
    assert sum(found) == pytest.approx(n_last * per_token, rel=0.01)
    with proxy.server(model, *FLAGS) as server:
        async with new_session() as session:
            for prompt, reply in turns:
                done = await complete(session, server.url, prompt, REPLY, cache_prompt=False)
                assert (done.tokens, done.timings["cache_n"]) == (reply, 0)


async def test_a_chat_in_its_slot_is_not_restored(model: Path, tmp_path: Path) -> None:
    rng, n_vocab = np.random.default_rng(4), vocab_size(model)
    history = random_prompt(rng, BASE, n_vocab).tolist()
    proxy = SlotProxy(tmp_path)
    with proxy.server(model, *FLAGS) as server:
        async with proxy.connect(server.url) as ask:
            for n_new in (BASE, SAID + 1, SAID + 1):
                done = await ask(history, REPLY)
                assert done.timings["prompt_n"] == n_new
                history = history + done.tokens + random_prompt(rng, SAID, n_vocab).tolist()
    assert (len(proxy.restore_s), len(proxy.save_s)) == (0, 3)
    assert len(sizes(tmp_path)) == 1


@counted
def test_what_ended_children_wrote_is_counted(tmp_path: Path) -> None:
    """Also what their children did, and nothing that went into RAM."""
    size = 3 << 20
    write = "import sys; open(sys.argv[1], 'wb').write(bytes(int(sys.argv[2])))"
    start = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"
    before = written_bytes()
    subprocess.run([sys.executable, "-c", start, write, tmp_path / "file", str(size)], check=True)
    assert size <= written_bytes() - before < 2 * size
    if SHM.is_dir() and SlotDir(SHM).in_ram:
        with tempfile.NamedTemporaryFile(dir=SHM) as file:
            before = written_bytes()
            subprocess.run([sys.executable, "-c", write, file.name, str(size)], check=True)
            assert written_bytes() - before < size


@counted
@pytest.mark.timeout(300)
def test_every_engine_beside_every_rival(
    model: Path, ctl: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command on a small load has the expected figures, and they are plausible."""
    load = SwitchLoad(
        chats=3,
        base_tokens=BASE,
        own_tokens=OWN,
        rounds=1,
        user_tokens=SAID,
        reply_tokens=REPLY,
        ctx_size=512,
        restart_chats=2,
    )
    monkeypatch.setattr(sys.modules[SwitchLoad.__module__], "QUICK", load)
    args = "bench", "switch", "--quick", "-m", model, "--engine", "both", "--rival", "both"
    found = json.loads(ctl(*args).stdout.splitlines()[-1])
    n_turn, n_turns = SAID + REPLY, load.chats + load.restart_chats
    n_first = BASE + OWN + REPLY - 1
    n_saved = load.chats * n_first + sum(n_first + n * n_turn for n in (1, 1, 1, 2, 2))
    written = found["slot_proxy_bytes_written"]
    assert ROW_BYTES <= written / n_saved <= ROW_BYTES + SLOT_TOKEN_BYTES
    assert found["slot_proxy_restores_missed"] == 0
    assert found["slot_proxy_prompt_tokens_p50"] == SAID + 1
    n_different = BASE + load.chats * (OWN + REPLY - 1) + n_turns * n_turn
    assert found["bytes_vs_slot_proxy_max"] == pytest.approx(n_saved / n_different)
    for prefix in ("", "proxied_"):
        ours = found[f"{prefix}towerd_bytes_written"]
        assert ours >= n_different * ROW_BYTES
        assert found[f"{prefix}bytes_vs_slot_proxy"] == pytest.approx(written / ours)
        ttft_s = found[f"{prefix}towerd_ttft_p50_s"]
        for rival, ratio in (("llama_server", "ratio"), ("slot_proxy", "ttft_vs_slot_proxy")):
            theirs_s = found[f"{prefix}{rival}_ttft_p50_s"]
            assert found[prefix + ratio] == pytest.approx(theirs_s / ttft_s)
        evaluating_s = found[f"{prefix}towerd_evaluating_p50_s"]
        assert 0 < evaluating_s < ttft_s
        ratio_max = found["slot_proxy_ttft_p50_s"] / evaluating_s
        assert found[f"{prefix}ttft_vs_slot_proxy_max"] == pytest.approx(ratio_max)
    assert found["towerd_tmpfs_bytes"] == 0
    assert found["proxied_towerd_tmpfs_bytes"] > 0


def test_nothing_is_compared_that_cannot_be_counted(
    model: Path, ctl: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If writes cannot be counted, the command fails before anything runs."""
    if not (SHM.is_dir() and SlotDir(SHM).in_ram):
        pytest.skip("no folder in RAM")
    monkeypatch.setattr(tempfile, "tempdir", str(SHM))
    said = ctl("bench", "switch", "-m", model, "--rival", "slot-proxy", code=1).stderr
    assert "TMPDIR" in said
