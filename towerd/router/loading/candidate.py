"""LoadCandidate: a model that needs the room of others, whose file is checked before they leave."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from towerd.router.loading.entry import ModelEntry
from towerd.router.loading.model import RoutedModel
from towerd.router.loading.process import ModelProcess


class LoadCandidate:
    """A model on its way to being loaded. The process that checked its file loads it as well."""

    def __init__(
        self, model: RoutedModel, make: Callable[[RoutedModel], Awaitable[ModelProcess]]
    ) -> None:
        """make: as for `Models`."""
        self.model = model
        self._make = make
        self._process: ModelProcess | None = None
        self._entry: ModelEntry | None = None
        """Whose files `_process` checked."""

    @property
    def needs_check(self) -> bool:
        """Whether the model's file was neither checked nor ever loaded."""
        return not self.model.was_loaded and self._entry is not self.model.entry

    async def check(self) -> None:
        """Check the model's file. Raises TowerdError and OSError: it cannot be loaded."""
        entry = self.model.entry
        await self.close()
        process = self._process = await self._make(self.model)
        await process.check()
        self._entry = entry

    async def take(self) -> ModelProcess:
        """The process to load the model in. Raises TowerdError."""
        process = self._process
        is_checked = process is not None and self._entry is self.model.entry
        if process is None or not is_checked or process.exit_code is not None:
            await self.close()
            return await self._make(self.model)
        self._process = None
        return process

    async def close(self) -> None:
        """End a process that was not taken."""
        process, self._process, self._entry = self._process, None, None
        if process is not None:
            await process.end()
