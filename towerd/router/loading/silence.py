"""What happens to the requests of a model whose process is stopped, or hangs."""

from __future__ import annotations

import asyncio
import logging

from towerd.engine.llama_server.process.silence import LOOK_S, SilenceWatch
from towerd.router.loading.model import RoutedModel
from towerd.router.loading.process import ModelProcess

log = logging.getLogger(__name__)


async def watch_silence(model: RoutedModel, process: ModelProcess) -> None:
    """Watch the process of a loaded model until cancelled. While it does not answer, its requests end with
    an error and new ones are refused. One for which the others wait is killed: what it did not commit
    is taken back, and the next request loads its model again."""
    watch = SilenceWatch(
        process.answer, pid=lambda: process.pid, is_busy=lambda: model.n_running > 0
    )
    while True:
        model.silent = await watch.until_silent()
        log.error("a model's process %s", model.silent, extra=_named(model, process))
        await process.drop_requests()
        answering = asyncio.create_task(watch.until_answer())
        try:
            while not answering.done():
                if process.blocks_others():
                    log.error("killed: others wait for it", extra=_named(model, process))
                    process.kill()
                await asyncio.wait((answering,), timeout=LOOK_S)
        finally:
            answering.cancel()
        model.silent = ""
        log.warning("a model's process answers again", extra=_named(model, process))


def _named(model: RoutedModel, process: ModelProcess) -> dict[str, object]:
    return {"model": model.name, "pid": process.pid}
