"""JSON of reuse, drift, timings and progress. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from towerd.drift import Drift
from towerd.engine.base import Finish, Progress, Reuse, Timings

Json = dict[str, Any]


def total(parts: Sequence[Reuse]) -> Reuse:
    """The reuse of several choices together."""
    kept = [reuse.kept for reuse in parts if reuse.kept is not None]
    return Reuse(
        live=sum(reuse.live for reuse in parts),
        hot=sum(reuse.hot for reuse in parts),
        warm=sum(reuse.warm for reuse in parts),
        prefill=sum(reuse.prefill for reuse in parts),
        approximate=sum(reuse.approximate for reuse in parts),
        cold=sum(reuse.cold for reuse in parts),
        moved=sum(reuse.moved for reuse in parts),
        checked=sum(reuse.checked for reuse in parts),
        refused=sum(reuse.refused for reuse in parts),
        kept=sum(kept) if kept else None,
    )


def timings_of(parts: Sequence[Timings]) -> Timings | None:
    """The timings of several choices together, which were generated side by side; None for none."""
    if not parts:
        return None
    return Timings(
        cache_n=sum(part.cache_n for part in parts),
        prompt_n=sum(part.prompt_n for part in parts),
        prompt_ms=sum(part.prompt_ms for part in parts),
        predicted_n=sum(part.predicted_n for part in parts),
        predicted_ms=max(part.predicted_ms for part in parts),
    )


def reuse_json(reuse: Reuse) -> Json:
    """Prompt tokens by the tier that they came from."""
    tiers = {"live": reuse.live, "hot": reuse.hot, "warm": reuse.warm, "prefill": reuse.prefill}
    more = {"approximate": reuse.approximate, "cold": reuse.cold}
    more |= {"moved": reuse.moved, "checked": reuse.checked, "refused": reuse.refused}
    return tiers | {name: n for name, n in more.items() if n}


def drift_json(drift: Drift | None) -> Json:
    """The drift and the noise floor to compare it with; nulls if it was not measured."""
    if drift is None:
        return {"kl": None, "floor_kl": None}
    return {"kl": drift.kl, "floor_kl": drift.floor_kl}


def towerd_json(finish: Finish) -> Json:
    """The `towerd` object in the last event of a stream."""
    out: Json = {"reuse": reuse_json(finish.reuse), "session": finish.session}
    if finish.truncated:
        out["truncated"] = True
    if finish.reuse.approximate:
        out["drift"] = drift_json(finish.reuse.drift)
    return out


def progress_json(progress: Progress) -> Json:
    """llama-server's `prompt_progress`."""
    return {
        "total": progress.total,
        "cache": progress.cache,
        "processed": progress.processed,
        "time_ms": int(progress.time_ms),
    }


def timings_json(timings: Timings) -> Json:
    """llama-server's `timings`. The first predicted token comes out of the prompt's evaluation,
    so the rates of prediction count one token less."""
    steps = max(timings.predicted_n - 1, 0)
    return {
        "cache_n": timings.cache_n,
        "prompt_n": timings.prompt_n,
        "prompt_ms": float(timings.prompt_ms),
        "prompt_per_token_ms": _ratio(timings.prompt_ms, timings.prompt_n),
        "prompt_per_second": _ratio(1e3 * timings.prompt_n, timings.prompt_ms),
        "predicted_n": timings.predicted_n,
        "predicted_ms": float(timings.predicted_ms),
        "predicted_per_token_ms": _ratio(timings.predicted_ms, steps),
        "predicted_per_second": _ratio(1e3 * steps, timings.predicted_ms),
    }


def _ratio(a: float, b: float) -> float:
    return a / b if b > 0 else 0.0
