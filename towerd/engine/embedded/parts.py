"""Parts: the parts of the embedded engine, constructed in one place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from towerd.engine.checkpoint_positions import CheckpointPositions
from towerd.engine.embedded.context.cell_pages import CellPages
from towerd.engine.embedded.context.core import Core, on_short_lived_thread
from towerd.engine.embedded.live.pool import LivePool
from towerd.engine.embedded.longchat.budgets import Budgets
from towerd.engine.embedded.longchat.observer import Observer, check_attention
from towerd.engine.embedded.longchat.shift import ContextShift
from towerd.engine.embedded.restore.branching import Branching
from towerd.engine.embedded.restore.checkpoints import Checkpoints
from towerd.engine.embedded.restore.exporter import Exporter
from towerd.engine.embedded.restore.hooks import Hook, Hooks
from towerd.engine.embedded.restore.moved import MovedJobs
from towerd.engine.embedded.restore.restorer import Restorer
from towerd.engine.embedded.run.drafts import Drafts
from towerd.engine.embedded.run.endings import Events
from towerd.engine.embedded.run.media import Media
from towerd.engine.embedded.run.scheduler import Scheduler
from towerd.engine.embedded.run.speculation import Speculator
from towerd.engine.moving.rotation import Rotation
from towerd.settings.config import Config
from towerd.tiers.checkpoint_tier import CheckpointTier
from towerd.tiers.manager import Tiers


class Parts:
    """The parts that belong to the inference thread."""

    def __init__(
        self,
        core: Core,
        tiers: Tiers,
        config: Config,
        checkpoint_tier: CheckpointTier | None,
        drafts: Drafts | None,
        deliver: Callable[[Events], None],
    ) -> None:
        """checkpoint_tier: needed for a model whose memory has a state; drafts: the source of drafts, if
        there is one; deliver: hands events to their clients. Raises ConfigError: a policy needs
        attention that cannot be read."""
        memory, context = core.memory, core.context
        self.observer = _observer(core, config)
        """Reads the attention; None unless the daemon was started with a policy that needs it."""
        pages = CellPages(
            context.host_buffers, memory.layout, n_cells=context.n_cells, v_trans=context.v_trans
        )
        self.pool = LivePool(
            memory,
            n_seqs=memory.n_live,
            n_cells=context.n_cells,
            has_places=core.model.has_cell_ext,
            on_drop=lambda seq: tiers.ranking.follow(seq.end, None),
        )
        self.rotation = Rotation(
            core.model, core.info.row_identity, context.n_cells, core.why_not_movable
        )
        checkpoints = None
        if checkpoint_tier is not None:
            ends, every = core.vocab.eog_ids, config.checkpoint_tokens
            positions = CheckpointPositions(core.vocab.pieces, ends, every)
            checkpoints = Checkpoints(memory, self.pool, tiers, checkpoint_tier, positions)
        self.exporter = Exporter(memory, tiers, checkpoints)
        tokens = Branching(memory, self.pool, tiers, self.exporter.export)
        branching = checkpoints or tokens
        folder = tiers.store.state.directory.tmp
        together = self.rotation  # of all that a chat holds: its states stay valid
        if core.why_not_movable:
            together = Rotation(core.model, core.info.row_identity, context.n_cells)
        self.keys = together
        """Whose rotation is undone in rows that are transform-coded."""
        self.budgets = Budgets(branching, core, self.observer, self.pool, together, config, folder)
        self.hooks = Hooks(Hook(branching), ContextShift(branching, tiers), self.budgets)
        self.moved = MovedJobs(core, self.pool, tiers, self.rotation, self.exporter.export)
        self.restorer = Restorer(
            memory, pages, self.pool, tiers, self.moved, self.hooks, checkpoints
        )
        speculator = Speculator(drafts, memory, self.pool, core.n_ctx)
        self.media = Media(core.projector, context, self.pool, self.restorer, speculator)
        self.scheduler = Scheduler(
            context,
            self.pool,
            memory,
            self.restorer,
            self.exporter,
            self.hooks,
            speculator,
            self.media,
            n_ctx=core.n_ctx,
            parallel=config.parallel,
            queue_max=config.queue_max,
            deliver=deliver,
            standings=lambda: tiers.ranking.live_standings,
        )

    def close(self) -> None:
        """End the threads, the inference thread first."""
        self.scheduler.close()
        self.media.close()
        self.scheduler.speculator.close()
        self.restorer.close()
        self.budgets.close()


def _observer(core: Core, config: Config) -> Observer | None:
    """None for a memory without rows, which `Budgets.check` refuses. Raises ConfigError."""
    memory = core.memory
    if core.taps is None or not memory.kind.has_rows:
        return None
    config = replace(config, flash_attn="off" if core.context.v_trans else "on")
    shape = on_short_lived_thread(lambda: check_attention(core.model, config))
    return Observer(core.taps, memory, shape)
