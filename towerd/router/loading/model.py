"""RoutedModel: what the router knows of one model: its state, its requests, its needs."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import Any

from towerd.api.http.keep_alive import KeepAlive
from towerd.errors import TowerdError, Unavailable
from towerd.router.loading.entry import ModelEntry
from towerd.router.loading.process import ModelProcess
from towerd.router.loading.room import Occupant
from towerd.settings.model_tables import ModelTable

FAILED_S = 10.0
"""A load that failed is not tried again for this long."""


class State(Enum):
    """llama-server's words, and one for what it shows as loaded."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    STOPPING = "stopping"


@dataclass(slots=True, eq=False)
class RoutedModel:
    """One model. `Models` changes it, on the event loop."""

    entry: ModelEntry
    table: ModelTable
    need_bytes: int
    """RAM that it takes: estimated, after its first load measured."""
    ram_share: int = 0
    """RAM that its next process may take, in bytes; 0: any."""
    state: State = State.UNLOADED
    process: ModelProcess | None = None
    loading: asyncio.Task[None] | None = None
    loaded_share: float = 0.0
    """While it is loading: the share of its weights that is loaded, from 0 to 1."""
    watch: asyncio.Task[None] | None = None
    """Waits for its process to end."""
    n_running: int = 0
    """Requests in its process."""
    n_waiting: int = 0
    """Requests that wait for it to be loaded."""
    last_used_s: float = 0.0
    """When a request of a client began last; time.monotonic, 0: never."""
    is_yielding: bool = False
    """Another model has waited long for its room: it takes no new requests until it has left."""
    is_unwanted: bool = False
    """It was unloaded while it was loading."""
    keep_alive: KeepAlive = field(default_factory=KeepAlive)
    """What requests said of how long it stays loaded."""
    is_gone: bool = False
    """It is not served any more, and is loaded for nobody."""
    was_loaded: bool = False
    """Its files were loaded before."""
    silent: str = ""
    """Why its process does not answer, as a part of a sentence; empty while it does."""
    exit_code: int = 0
    """How its process ended last."""
    failure: TowerdError | None = None
    """Why the last load failed."""
    failed_s: float = 0.0
    info: dict[str, Any] = field(default_factory=dict)
    """What its process says of it in GET /v1/models."""
    idle_timer: asyncio.TimerHandle | None = None

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def takes_requests(self) -> bool:
        return self.state is State.LOADED and not self.is_yielding

    @property
    def is_running(self) -> bool:
        """Whether there is a process of it, as llama-server means it."""
        return self.state is not State.UNLOADED

    @property
    def shown_state(self) -> str:
        """The state in llama-server's words."""
        return "loaded" if self.state is State.STOPPING else self.state.value

    @property
    def is_on_its_way(self) -> bool:
        """Whether it is being loaded, or waits for room to be."""
        return self.state is State.LOADING or self.loading is not None

    @property
    def idle_s(self) -> float:
        """Seconds without a request after which it is unloaded; may be infinite."""
        if self.keep_alive.seconds is not None:
            return self.keep_alive.seconds
        return inf if self.table.idle_s is None else self.table.idle_s

    def become(self, new: RoutedModel) -> None:
        """Have other files from the next load on."""
        self.entry, self.table, self.need_bytes = new.entry, new.table, new.need_bytes
        self.failure, self.was_loaded = None, False

    def occupies(self, beside: RoutedModel | None = None) -> Occupant:
        """What it takes of the room that another model needs."""
        waits = self.n_waiting > 0 and not self.is_yielding
        return Occupant(
            self.name,
            self.need_bytes,
            self.last_used_s,
            is_busy=self.n_running > 0 or waits or self.state is State.LOADING,
            keep=self.table.keep,
            is_twin=beside is not None and self.is_twin_of(beside),
            is_leaving=self.state is State.STOPPING,
        )

    def is_twin_of(self, other: RoutedModel) -> bool:
        """Whether it is the same file, under another name with other settings."""
        return bool(self.entry.file_id) and self.entry.file_id == other.entry.file_id

    def unanswered(self) -> Unavailable:
        """The error of a request while the process does not answer."""
        return Unavailable(
            f"The process of the model {self.name} {self.silent}: try again when it answers"
        )

    def raise_recent_failure(self) -> None:
        """Raises why loading it failed, if that was just now."""
        if self.failure is not None and time.monotonic() - self.failed_s < FAILED_S:
            raise self.failure.with_traceback(None)  # or each raise would add to it
