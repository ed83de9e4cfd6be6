"""Prometheus metrics: those of llama-server, under its names, and towerd's own.

Counters are incremented as requests finish. Gauges of the engine, the tiers and the store are read
from their `stats()` when /metrics is scraped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from towerd.engine.base import Finish

# Otherwise every counter gets a second series, which llama-server does not have.
disable_created_metrics()  # type: ignore[no-untyped-call]

Stats = Mapping[str, Any]

TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
LAG_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.25, 1.0)


@dataclass(frozen=True, slots=True)
class StatsMetric:
    """One metric whose value is read from `stats()`."""

    name: str
    source: str
    """Whose `stats()`: `engine`, `tiers`, `store`, `footprint`, `written`, `cold`, `traffic`, `shared` or `ram`."""
    key: str
    help: str
    counter: bool = False


# fmt: off
SAMPLES = (
    StatsMetric("llamacpp:n_decode_total", "engine", "decode_steps",
           "Total number of llama_decode() calls", counter=True),
    StatsMetric("llamacpp:spec_decode_num_draft_tokens_total", "engine", "draft_tokens",
           "Speculative: Total draft tokens generated", counter=True),
    StatsMetric("llamacpp:spec_decode_num_accepted_tokens_total", "engine", "draft_tokens_accepted",
           "Speculative: Total draft tokens accepted by the target model", counter=True),
    StatsMetric("llamacpp:spec_decode_num_drafts_total", "engine", "drafts",
           "Speculative: Total speculative decoding verification steps", counter=True),
    StatsMetric("llamacpp:requests_processing", "engine", "running", "Number of requests processing"),
    StatsMetric("llamacpp:requests_deferred", "engine", "waiting", "Number of requests deferred"),
    StatsMetric("llamacpp:n_busy_slots_per_decode", "engine", "busy_slots_per_decode",
           "Average number of busy slots per llama_decode() call"),
    StatsMetric("towerd_live_cells_used", "engine", "live_cells_used",
           "Cells of the live context that hold a token's rows"),
    StatsMetric("towerd_live_cells", "engine", "live_cells", "Cells of the live context"),
    StatsMetric("towerd_media_encoded_total", "engine", "media_encoded",
           "Pictures and sounds that were encoded", counter=True),
    StatsMetric("towerd_ram_bytes", "ram", "ram_bytes",
           "RAM that this process takes, with those that it has started"),
    StatsMetric("towerd_ram_bytes_max", "ram", "ram_bytes_max", "RAM that they may take; NaN without a limit"),
    StatsMetric("towerd_ram_bytes_peak", "ram", "ram_bytes_peak", "The most RAM that was seen"),
    StatsMetric("towerd_ram_refusals_total", "ram", "ram_refusals",
           "Requests refused because there was no RAM for them", counter=True),
    StatsMetric("towerd_hot_bytes", "tiers", "hot_bytes", "Native rows held in RAM"),
    StatsMetric("towerd_warm_bytes", "tiers", "warm_bytes", "Rows held in segment files"),
    StatsMetric("towerd_warm_quantized_bytes", "tiers", "warm_quantized_bytes",
           "Rows held in segment files in a block format"),
    StatsMetric("towerd_warm_coded_bytes", "tiers", "warm_coded_bytes",
           "Rows held in segment files in a transform coding"),
    StatsMetric("towerd_segments_transformed_total", "tiers", "segments_transformed",
           "Segments that were transform-coded", counter=True),
    StatsMetric("towerd_moved_bytes", "tiers", "moved_bytes",
           "Rows held in segment files that were moved after other text, or computed from such rows"),
    StatsMetric("towerd_dropped_bytes", "tiers", "dropped_bytes",
           "Segment files that were dropped and are still read, such as by long chats"),
    StatsMetric("towerd_parked_bytes", "engine", "parked_bytes",
           "RAM of chats with a live budget that are not in the live context"),
    StatsMetric("towerd_recall_bytes", "engine", "recall_bytes",
           "RAM of rows and indexes that chats in the live context can recall from"),
    StatsMetric("towerd_recall_disk_bytes", "engine", "recall_disk_bytes",
           "Files of rows that chats with a live budget can recall"),
    StatsMetric("towerd_retention_observe_seconds_total", "engine", "retention_observe_s",
           "Seconds spent on the attention of chats with a live budget", counter=True),
    StatsMetric("towerd_boundary_states", "engine", "boundary_states",
           "State checkpoints that can be resumed from"),
    StatsMetric("towerd_boundary_bytes", "engine", "boundary_bytes", "State checkpoints on disk"),
    StatsMetric("towerd_boundary_resumes_total", "engine", "boundary_resumes",
           "State checkpoints that a prompt was resumed from", counter=True),
    StatsMetric("towerd_boundary_evictions_total", "engine", "boundary_evictions",
           "State checkpoints deleted to keep their budget", counter=True),
    StatsMetric("towerd_segments_squeezed_total", "tiers", "segments_squeezed",
           "Segments put into a smaller format because space was short", counter=True),
    StatsMetric("towerd_segments_shrunk_total", "tiers", "segments_shrunk",
           "Segments put into the stored format of their level", counter=True),
    StatsMetric("towerd_damaged_segments_total", "tiers", "damaged_segments",
           "Segments quarantined because their check failed", counter=True),
    StatsMetric("towerd_write_errors_total", "tiers", "write_errors",
           "Segment files that could not be written", counter=True),
    StatsMetric("towerd_restores_total", "engine", "restores",
           "Towers restored into a slot of llama-server", counter=True),
    StatsMetric("towerd_restores_missed_total", "engine", "restores_missed",
           "Restored slots that llama-server did not use", counter=True),
    StatsMetric("towerd_restored_bytes_total", "engine", "restore_bytes",
           "Slot files restored", counter=True),
    StatsMetric("towerd_slot_saves_total", "engine", "saves",
           "Slots of llama-server that were saved", counter=True),
    StatsMetric("towerd_upstream_restarts_total", "engine", "restarts",
           "Times llama-server was started again", counter=True),
    StatsMetric("towerd_anticipated_tokens_total", "traffic", "anticipated_tokens",
           "Tokens evaluated in idle time for prompts that were expected", counter=True),
    StatsMetric("towerd_anticipated_tokens_used_total", "traffic", "anticipated_tokens_used",
           "Those that a prompt then began with", counter=True),
    StatsMetric("towerd_anticipated_tokens_wasted_total", "traffic", "anticipated_tokens_wasted",
           "Those that no prompt began with", counter=True),
    StatsMetric("towerd_moved_tokens_total", "engine", "tokens_moved",
           "Prompt tokens whose rows were kept after changed text", counter=True),
    StatsMetric("towerd_moved_checked_tokens_total", "engine", "tokens_move_checked",
           "Tokens evaluated again to check such rows", counter=True),
    StatsMetric("towerd_moved_refused_tokens_total", "engine", "tokens_move_refused",
           "Tokens of known runs that were evaluated because the rows deviated", counter=True),
    StatsMetric("towerd_moved_exact_tokens_total", "traffic", "moved_tokens_made_exact",
           "Tokens evaluated in idle time of conversations with moved rows", counter=True),
    StatsMetric("towerd_moved_answers", "traffic", "moved_answers_measured",
           "Answers from moved rows whose drift was measured, the last ones"),
    StatsMetric("towerd_moved_excess_mean", "traffic", "moved_excess_mean",
           "Their mean drift over the model's noise, in nats"),
    StatsMetric("towerd_moved_excess_high", "traffic", "moved_excess_p99",
           "The 99th percentile of it"),
    StatsMetric("towerd_moved_excess_worst", "traffic", "moved_excess_worst", "The largest of it"),
    StatsMetric("towerd_workflows", "traffic", "workflow_workflows", "Workflows that run"),
    StatsMetric("towerd_workflow_steps_total", "traffic", "workflow_steps",
           "Requests that were steps of workflows", counter=True),
    StatsMetric("towerd_prefetched_bytes_total", "tiers", "prefetched_bytes",
           "Rows made live for the next steps of workflows", counter=True),
    StatsMetric("towerd_prefetched_used_bytes_total", "tiers", "prefetched_bytes_used",
           "Those that a request used", counter=True),
    StatsMetric("towerd_prefetched_wasted_bytes", "tiers", "prefetched_bytes_wasted",
           "Those that the next step did not use, unless a later one has"),
    StatsMetric("towerd_prefetch_stopped", "tiers", "prefetch_stopped",
           "1 while too much was wasted, so that nothing is prefetched"),
    StatsMetric("towerd_frozen_sessions", "cold", "frozen_sessions", "Sessions kept as coded text"),
    StatsMetric("towerd_cold_bytes", "cold", "cold_bytes", "What their coded tokens take"),
    StatsMetric("towerd_copied_sessions", "cold", "copied_sessions",
           "Unused sessions that have a coded copy beside their rows"),
    StatsMetric("towerd_freezes_total", "cold", "freezes", "Sessions that were frozen", counter=True),
    StatsMetric("towerd_freeze_seconds_total", "cold", "freeze_seconds",
           "Time spent on copies and freezing, checks included", counter=True),
    StatsMetric("towerd_alike_coded_total", "cold", "alike_coded",
           "Sessions coded after a base that is like their prompt", counter=True),
    StatsMetric("towerd_alike_saved_bytes_total", "cold", "alike_bytes_saved",
           "Bytes of coded tokens that this saved", counter=True),
    StatsMetric("towerd_recodes_total", "cold", "recodes",
           "Sessions whose coded form was renewed", counter=True),
    StatsMetric("towerd_thaws_total", "cold", "thaws", "Sessions that were thawed", counter=True),
    StatsMetric("towerd_thaw_seconds_total", "cold", "thaw_seconds",
           "Time spent getting their tokens back", counter=True),
    StatsMetric("towerd_thaws_ahead_total", "cold", "thaws_ahead",
           "Conversations evaluated before they were asked for", counter=True),
    StatsMetric("towerd_cold_failures_total", "cold", "cold_failures",
           "Sessions that could not be frozen or thawed", counter=True),
    StatsMetric("towerd_sessions", "store", "sessions", "Sessions in the catalog"),
    StatsMetric("towerd_slot_file_bytes", "footprint", "slot_bytes",
           "What a slot file for each conversation would take"),
    StatsMetric("towerd_shared_bytes", "footprint", "shared_bytes",
           "Native rows of all tokens, those of shared prefixes once"),
    StatsMetric("towerd_kept_bytes", "footprint", "kept_bytes",
           "Rows on disk, token ids and coded text"),
    StatsMetric("towerd_disk_max_bytes", "store", "disk_bytes_max",
           "What --disk-max allows; NaN without a limit"),
    StatsMetric("towerd_disk_other_bytes", "store", "disk_other_bytes",
           "Bytes of the store beside segment files; NaN without --disk-max"),
    StatsMetric("towerd_write_budget_bytes", "written", "budget_bytes",
           "What --write-budget allows a day; NaN without a limit"),
    StatsMetric("towerd_writes_refused_total", "written", "refused",
           "Times that rows were not written for want of budget", counter=True),
    StatsMetric("towerd_segments", "store", "segments", "Segments in the prefix tree"),
    StatsMetric("towerd_shared_put_total", "shared", "objects_put",
           "Objects put into the shared tier", counter=True),
    StatsMetric("towerd_shared_put_bytes_total", "shared", "bytes_put", "Their bytes", counter=True),
    StatsMetric("towerd_shared_fetched_total", "shared", "objects_fetched",
           "Objects fetched from the shared tier", counter=True),
    StatsMetric("towerd_shared_fetched_bytes_total", "shared", "bytes_fetched", "Their bytes", counter=True),
    StatsMetric("towerd_shared_missing_total", "shared", "objects_missing",
           "Objects with rows that were gone from the shared tier", counter=True),
    StatsMetric("towerd_shared_damaged_total", "shared", "objects_damaged",
           "Objects of the shared tier that were refused: damaged, or not what they should be", counter=True),
    StatsMetric("towerd_shared_deleted_total", "shared", "objects_deleted",
           "Objects that this daemon deleted from the shared tier", counter=True),
    StatsMetric("towerd_shared_deleted_bytes_total", "shared", "bytes_deleted", "Their bytes", counter=True),
    StatsMetric("towerd_shared_lookups_total", "shared", "lookups",
           "Prompts that were looked up in the shared tier", counter=True),
    StatsMetric("towerd_shared_lookups_found_total", "shared", "lookups_found",
           "Those that it had rows of", counter=True),
    StatsMetric("towerd_shared_lookups_late_total", "shared", "lookups_late",
           "Those that were evaluated because it took too long", counter=True),
    StatsMetric("towerd_shared_saved_total", "shared", "files_saved",
           "Files whose rows were put into the shared tier because they were about to leave the disk", counter=True),
    StatsMetric("towerd_shared_errors_total", "shared", "errors",
           "Times that the object store did not do what was asked", counter=True),
)
# fmt: on


def _by_kind(kinds: Stats) -> Metric:
    """Bytes written to the store today, by what they were."""
    text = "Bytes written to the store on this day"
    family = GaugeMetricFamily("towerd_written_today_bytes", text, labels=("kind",))
    for kind, n_bytes in kinds.items():
        family.add_metric((kind,), n_bytes)
    return family


def _by_format(formats: Iterable[Stats]) -> Iterator[Metric]:
    """Rows on disk by the format that they are stored in."""
    for key, text in (("bytes", "Bytes of rows on disk"), ("tokens", "Tokens with rows on disk")):
        family = GaugeMetricFamily(f"towerd_format_{key}", text, labels=("format",))
        for each in formats:
            family.add_metric((each["format"],), each[key])
        yield family


def _by_position(accepted: Iterable[int]) -> Metric:
    """Accepted draft tokens by position. As in llama-server, absent before the first draft."""
    name = "llamacpp:spec_decode_num_accepted_tokens_per_pos_total"
    family = CounterMetricFamily(name, "Accepted tokens per draft position", labels=("position",))
    for position, n in enumerate(accepted):
        family.add_metric((str(position),), n)
    return family


class _StatsCollector(Collector):
    """Exposes the stats that were read last."""

    def __init__(self) -> None:
        self.stats: dict[str, Stats] = {}

    def collect(self) -> Iterator[Metric]:
        for sample in SAMPLES:
            value = self.stats.get(sample.source, {}).get(sample.key, 0)
            kind = CounterMetricFamily if sample.counter else GaugeMetricFamily
            known = math.nan if value is None else float(value)
            yield kind(sample.name, sample.help, value=known)
        if accepted := self.stats.get("engine", {}).get("draft_tokens_accepted_at"):
            yield _by_position(accepted)

        yield _by_kind(self.stats.get("written", {}).get("kinds", {}))
        yield from _by_format(self.stats.get("footprint", {}).get("formats", ()))

    def describe(self) -> Iterable[Metric]:
        return []


class RequestMetrics:
    """What every process that answers requests measures."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self.started_unix = int(time.time())
        self.requests = Counter(
            "towerd_requests",
            "Requests answered",
            ("route", "status"),
            registry=self.registry,
        )
        self.lag = Histogram(
            "towerd_loop_lag_seconds",
            "How late the event loop ran a timer",
            buckets=LAG_BUCKETS_S,
            registry=self.registry,
        )


class Metrics(RequestMetrics):
    """All metrics of one daemon."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        super().__init__(registry)
        self._stats = _StatsCollector()
        self.registry.register(self._stats)

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(name, text, labels, registry=self.registry)

        self.reused = counter("towerd_tokens_reused", "Prompt tokens not evaluated", ("tier",))
        self.prefilled = counter("towerd_tokens_prefilled", "Prompt tokens evaluated")
        self.generated = counter("towerd_tokens_generated", "Tokens generated")
        self.prompt_tokens = counter(
            "llamacpp:prompt_tokens", "Number of prompt tokens processed, excluding cached tokens"
        )
        self.cached_tokens = counter(
            "llamacpp:prompt_tokens_cached", "Number of prompt tokens reused from the cache"
        )
        self.prompt_seconds = counter(
            "llamacpp:prompt_seconds", "Total time spent processing prompts"
        )
        self.predicted_tokens = counter(
            "llamacpp:tokens_predicted", "Number of generation tokens processed"
        )
        self.predicted_seconds = counter(
            "llamacpp:tokens_predicted_seconds", "Total time spent generating tokens"
        )
        self.n_tokens_max = Gauge(
            "llamacpp:n_tokens_max",
            "Largest observed sequence length (prompt + generation)",
            registry=self.registry,
        )
        self._n_tokens_max = 0
        self._totals = {"live": 0, "hot": 0, "warm": 0, "prefill": 0}
        self._rates = _Rates()
        self.registry.register(self._rates)
        self.ttft = Histogram(
            "towerd_ttft_seconds",
            "From a parsed request to its first token",
            buckets=TTFT_BUCKETS_S,
            registry=self.registry,
        )

    def finished(self, finish: Finish) -> None:
        """Account for one finished generation."""
        reuse, timings = finish.reuse, finish.timings
        for tier in self._totals:
            self._totals[tier] += getattr(reuse, tier)
        for tier in ("live", "hot", "warm"):
            self.reused.labels(tier).inc(getattr(reuse, tier))
        self.prefilled.inc(reuse.prefill)
        self.generated.inc(timings.predicted_n)
        self.prompt_tokens.inc(timings.prompt_n)
        self.cached_tokens.inc(timings.cache_n)
        self.prompt_seconds.inc(timings.prompt_ms / 1e3)
        self.predicted_tokens.inc(timings.predicted_n)
        self.predicted_seconds.inc(timings.predicted_ms / 1e3)
        self._n_tokens_max = max(self._n_tokens_max, finish.n_cached)
        self.n_tokens_max.set(self._n_tokens_max)
        self._rates.add(finish)

    def reuse_totals(self) -> dict[str, int]:
        """Prompt tokens of all finished requests, by tier."""
        return dict(self._totals)

    def render(self, stats: Mapping[str, Stats]) -> bytes:
        """The exposition text. stats: source -> its `stats()`. Slow, as it formats every series:
        call it off the event loop."""
        self._stats.stats = dict(stats)
        return generate_latest(self.registry)


class _Rates(Collector):
    """llama-server's two throughput gauges: averages since the last scrape."""

    def __init__(self) -> None:
        self._prompt = [0, 0.0]
        self._predicted = [0, 0.0]

    def add(self, finish: Finish) -> None:
        timings = finish.timings
        self._prompt[0] += timings.prompt_n
        self._prompt[1] += timings.prompt_ms / 1e3
        self._predicted[0] += max(timings.predicted_n - 1, 0)
        self._predicted[1] += timings.predicted_ms / 1e3

    def collect(self) -> Iterator[Metric]:
        prompt, self._prompt = self._prompt, [0, 0.0]
        predicted, self._predicted = self._predicted, [0, 0.0]
        for name, text, (n, seconds) in (
            ("prompt_tokens_seconds", "Average prompt throughput in tokens/s", prompt),
            ("predicted_tokens_seconds", "Average generation throughput in tokens/s", predicted),
        ):
            value = n / seconds if seconds > 0 else 0.0
            yield GaugeMetricFamily(f"llamacpp:{name}", text, value=value)

    def describe(self) -> Iterable[Metric]:
        return []
