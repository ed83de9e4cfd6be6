"""Prometheus metrics of the router itself; those of a model are asked for with its name."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import Counter, Gauge, generate_latest

from towerd.api.http.metrics import RequestMetrics
from towerd.router.loading.model import RoutedModel


class RouterMetrics(RequestMetrics):
    """Counts loads and unloads; gauges are set when they are read."""

    def __init__(self) -> None:
        super().__init__()

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, registry=self.registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, registry=self.registry)

        self.loads = counter("towerd_model_loads", "Models that were loaded")
        self.load_seconds = counter("towerd_model_load_seconds", "Time spent loading models")
        self.unloads = counter("towerd_model_unloads", "Models that were unloaded in order")
        self.crashes = counter(
            "towerd_model_crashes", "Processes of models that ended by themselves"
        )
        self._loaded = gauge("towerd_models_loaded", "Models that are loaded")
        self._waiting = gauge("towerd_model_requests_waiting", "Requests that wait for their model")
        self._need = gauge("towerd_models_bytes", "RAM that the loaded models take")

    def loaded(self, seconds: float) -> None:
        """Account for one load."""
        self.loads.inc()
        self.load_seconds.inc(seconds)

    def render(self, models: Iterable[RoutedModel]) -> bytes:
        """The exposition text."""
        models = list(models)
        running = [model for model in models if model.is_running]
        self._loaded.set(len(running))
        self._waiting.set(sum(model.n_waiting for model in models))
        self._need.set(sum(model.need_bytes for model in running))
        return generate_latest(self.registry)
