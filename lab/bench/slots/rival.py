"""`towerctl bench switch --rival slot-proxy`: a llama-server whose slots are saved and restored whole."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from lab.bench.slots.proxy import SlotProxy
from towerd.cli.bench.switch import Outcome, SwitchLoad, SwitchRival, drive


def bytes_ratio_max(load: SwitchLoad) -> float:
    """The rows of whole slots, saved at every turn, over the distinct rows of all chats. The
    last token of a chat has no rows."""
    n_turn = load.user_tokens + load.reply_tokens
    n_restarted = min(load.restart_chats, load.chats)
    n_first = load.base_tokens + load.own_tokens + load.reply_tokens - 1
    n_after = [n_first + turn * n_turn for turn in range(load.rounds + 2)]
    n_saved = load.chats * sum(n_after[:-1]) + n_restarted * n_after[-1]
    n_own = load.chats * (n_after[-2] - load.base_tokens) + n_restarted * n_turn
    return n_saved / (load.base_tokens + n_own)


async def _drive_slot_proxy(path: Path, load: SwitchLoad, n_vocab: int) -> Outcome:
    """Run the load on a llama-server whose slots are saved and restored at every turn."""
    with tempfile.TemporaryDirectory(prefix="towerd-bench-") as folder:
        rival, ctx = SlotProxy(Path(folder)), str(load.ctx_size)
        outcome = await drive(lambda: rival.server(path, "-c", ctx), rival.connect, load, n_vocab)
    outcome.bytes_written = rival.bytes_written
    outcome.stats = {
        "restores": len(rival.restore_s),
        "restores_missed": rival.restores_missed,
        "restore_p50_s": statistics.median(rival.restore_s),
        "save_p50_s": statistics.median(rival.save_s),
    }
    return outcome


def _beside_slot_proxy(load: SwitchLoad, ours: Outcome, theirs: Outcome) -> dict[str, Any]:
    median, stats = statistics.median, theirs.stats
    return {
        "slot_proxy_ttft_p50_s": median(theirs.switches),
        "ttft_vs_slot_proxy": median(theirs.switches) / median(ours.switches),
        "ttft_vs_slot_proxy_max": median(theirs.switches) / median(ours.evaluating),
        "slot_proxy_bytes_written": theirs.bytes_written,
        "towerd_bytes_written": ours.bytes_written,
        "bytes_vs_slot_proxy": theirs.bytes_written / ours.bytes_written,
        "bytes_vs_slot_proxy_max": bytes_ratio_max(load),
        "towerd_tmpfs_bytes": ours.slot_file_bytes,
        "slot_proxy_after_restart_s": median(theirs.restarted),
        "slot_proxy_first_s": median(theirs.first),
        "slot_proxy_prompt_tokens_p50": median(theirs.evaluated),
        "slot_proxy_evaluating_p50_s": median(theirs.evaluating),
        **{f"slot_proxy_{key}": value for key, value in stats.items()},
        "slot_proxy_rss_bytes": theirs.rss_bytes,
    }


RIVAL = SwitchRival(_drive_slot_proxy, _beside_slot_proxy)
