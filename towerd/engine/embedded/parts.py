"""Parts: the parts of the embedded engine, constructed in one place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from towerd.engine.embedded.context.cell_pages import CellPages
from towerd.engine.embedded.context.core import Core, on_short_lived_thread
from towerd.engine.embedded.live.pool import LivePool
from towerd.engine.embedded.longchat.budgets import Budgets
from towerd.engine.embedded.longchat.observer import Observer, check_attention
from towerd.engine.embedded.longchat.recall import RecallLimits
from towerd.engine.embedded.longchat.shift import ContextShift
from towerd.engine.embedded.restore.branching import Branching
from towerd.engine.embedded.restore.checkpoints import Checkpoints
from towerd.engine.embedded.restore.exporter import Exporter
from towerd.engine.embedded.restore.hooks import Hook, Hooks
from towerd.engine.embedded.restore.restorer import Restorer
from towerd.engine.embedded.restore.splice import Splicer
from towerd.engine.embedded.run.endings import Events
from towerd.engine.embedded.run.media import Media
from towerd.engine.embedded.run.scheduler import Scheduler
from towerd.engine.embedded.run.speculation import Speculator
from towerd.settings.config import Config, parked_bytes
from towerd.slots.kind import DENSE
from towerd.tiers.checkpoint_tier import CheckpointTier
from towerd.tiers.manager import Tiers


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts that belong to the inference thread."""

    pool: LivePool
    splicer: Splicer
    observer: Observer | None
    """Reads the attention; None unless the daemon was started with a policy that needs it."""
    budgets: Budgets
    hooks: Hooks
    exporter: Exporter
    restorer: Restorer
    media: Media
    scheduler: Scheduler

    def close(self) -> None:
        """End the threads, the inference thread first."""
        self.scheduler.close()
        self.media.close()
        self.scheduler.speculator.close()
        self.restorer.close()
        self.budgets.close()


def assemble(
    core: Core,
    tiers: Tiers,
    config: Config,
    checkpoint_tier: CheckpointTier | None,
    speculator: Callable[[LivePool], Speculator],
    deliver: Callable[[Events], None],
) -> Parts:
    """Construct the parts. checkpoint_tier: needed for a model whose memory has a state; deliver: hands
    events to their clients. Raises ConfigError: a policy needs attention that cannot be read."""
    memory, context = core.memory, core.context
    observer = _observer(core, config)
    pages = CellPages(
        context.host_buffers, memory.layout, n_cells=context.n_cells, v_trans=context.v_trans
    )
    pool = LivePool(memory, n_seqs=memory.n_live, n_cells=core.context.n_cells)
    splicer = Splicer(core, tiers)
    checkpoints = None
    if checkpoint_tier is not None:
        ends, every = core.vocab.eog_ids, config.boundary_tokens
        checkpoints = Checkpoints(memory, pool, tiers, checkpoint_tier, ends, every)
    exporter = Exporter(memory, tiers, checkpoints)
    tokens = Branching(memory, pool, tiers, exporter.export)
    branching = checkpoints or tokens
    budgets = _budgets(core, observer, tiers, config, pool, splicer, tokens)
    hooks = Hooks(Hook(branching), ContextShift(branching, tiers), budgets)
    restorer = Restorer(memory, pages, pool, tiers, splicer, hooks, checkpoints)
    media = Media(core.projector, core.context, pool, restorer)
    scheduler = Scheduler(
        core.context,
        pool,
        memory,
        restorer,
        exporter,
        hooks,
        speculator(pool),
        media,
        n_ctx=core.n_ctx,
        parallel=config.parallel,
        queue_max=config.queue_max,
        deliver=deliver,
    )
    return Parts(pool, splicer, observer, budgets, hooks, exporter, restorer, media, scheduler)


def _observer(core: Core, config: Config) -> Observer | None:
    """None for a memory that cannot lose positions, which `Budgets.check` refuses. Raises ConfigError."""
    memory = core.memory
    if core.taps is None or memory.kind is not DENSE:
        return None
    cell_ext = memory.layout.cell_ext
    shape = on_short_lived_thread(lambda: check_attention(core.model, config, cell_ext=cell_ext))
    return Observer(core.taps, memory, shape)


def _budgets(
    core: Core,
    observer: Observer | None,
    tiers: Tiers,
    config: Config,
    pool: LivePool,
    splicer: Splicer,
    tokens: Branching,
) -> Budgets:
    limits = RecallLimits(
        config.recall_every,
        config.recall_layer_step,
        config.threads,
        config.recall_bytes,
        config.recall_disk_bytes,
    )
    folder = tiers.store.state.directory.tmp
    return Budgets(tokens, core, observer, pool, splicer, parked_bytes(config), limits, folder)
