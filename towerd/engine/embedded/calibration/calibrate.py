"""Calibrator: measures, while the daemon is idle, which stored formats the model tolerates.

A thread of its own runs the search; the model is used in small steps on the inference thread, and
only while no request runs or waits. The result is kept in the catalog, one per row identity.
SmolLM2 (135M parameters, two cores) takes some minutes of it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from towerd.codec.rows.basis import Basis
from towerd.engine.embedded.calibration.measure import Measured, Measurer
from towerd.engine.embedded.calibration.measure_plan import MeasurePlan, plan_measurement
from towerd.engine.embedded.calibration.moved import MovedMeter, limits_of, plan_changes
from towerd.engine.embedded.calibration.progress import CalibrationProgress
from towerd.engine.embedded.calibration.scratch import Scratch, SteppedSequence, other_shapes
from towerd.engine.embedded.calibration.transform import (
    LEARN_CONTINUATIONS,
    LEARNED_SHARE,
    MEASURED_MAX,
    learn_transform,
)
from towerd.engine.embedded.calibration.transform import (
    expected_tokens as expected_to_learn,
)
from towerd.engine.embedded.calibration.unfinished import Unfinished
from towerd.engine.embedded.context.core import Core
from towerd.engine.embedded.run.scheduler import Scheduler
from towerd.engine.moving.rotation import Rotation
from towerd.errors import DiskFull, NotSupported, RamLimitReached, StoreError, TowerdError
from towerd.model.vocab import Vocab
from towerd.slots.kind import WINDOW
from towerd.store import Store
from towerd.store.rows.recoding import CodingInterrupted
from towerd.store.segments.coded_format import basis_name
from towerd.system.eigen import EigenFailed, patient_eigh
from towerd.system.priority import lower_priority
from towerd.tiers.formats.calibration import (
    BOUNDS,
    VERSION,
    Calibration,
    formats_digest,
    load_calibration,
    save_calibration,
    sizes,
)
from towerd.tiers.formats.format_search import (
    calibrate,
    choose_ends,
    expected_of_ends,
    expected_tokens,
)
from towerd.tiers.formats.packaged import packaged_calibration
from towerd.tiers.formats.transform import (
    VERSION as TRANSFORM_VERSION,
)
from towerd.tiers.formats.transform import (
    TransformChoice,
    load_transform,
    save_transform,
)
from towerd.tiers.manager import Tiers
from towerd.tiers.moved_limits import load_moved_limits, save_moved_limits

log = logging.getLogger(__name__)

T = TypeVar("T")
State: TypeAlias = Literal["off", "waiting", "running", "done", "failed"]

TEXT = "calibration.txt"
CONTINUATIONS_MAX = 64
"""The most continuations that a table is measured on (4,096 tokens). A time limit would give other
results on every machine."""
_IDLE_S = 60.0
"""How long the engine must have been idle before a calibration begins by itself."""
_POLL_S = 0.5
_RAM_BYTES, _RAM_TOKENS = 64 << 20, 4096
"""RAM that a measurement takes beside the context: so many bytes, and the rows of so many tokens."""
_BUSY_S = 0.2
"""How long to wait before asking again whether a step may run."""
_LOOK_S = 0.02
"""How long what uses no model waits before it looks again whether a request runs."""
LEARN_RETRY_S = (600.0, 86_400.0)
"""Time until transform codings that could not be learned, or kept, are tried again: at first, and at most."""
_STEP_S = 0.25
"""How long a step may take: a request that arrives meanwhile waits for it."""


class _CalibrationStopped(Exception):
    """The daemon closes."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """What was asked for: to measure again what was measured, and stored formats."""

    again: bool
    formats: bool


class Calibrator:
    """All methods may be called from any thread. `start` it once, `close` it before the engine."""

    def __init__(
        self,
        core: Core,
        scheduler: Scheduler,
        store: Store,
        tiers: Tiers,
        *,
        rotation: Rotation,
        keys: Rotation | None = None,
        fidelity: str,
        forced: bool,
        transforms: bool = True,
        idle_s: float = _IDLE_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """rotation: of rows that are moved; keys: of those that are transform-coded; None: the same
        transforms: whether any are
        fidelity: near or small, whose table is applied; exact applies none
        forced: the operator chose the formats, so that a calibration changes nothing by itself"""
        self.fidelity = fidelity
        self.why_off = _why_off(core, fidelity, forced)
        """Why no stored formats are measured; "" if they are."""
        self._may_move = fidelity in BOUNDS and not core.why_not_movable
        self._core = core
        self._scheduler = scheduler
        self._store = store
        self._tiers = tiers
        self._rotation = rotation
        self._keys = keys or rotation
        self._transforms = transforms and not self.why_off
        self._transform: TransformChoice | None = None
        self._unsaved: tuple[TransformChoice, Basis | None] | None = None
        """What was learned and could not be kept yet."""
        self._learn_due, self._learn_wait_s = 0.0, LEARN_RETRY_S[0]
        """time.monotonic() at which it is tried again, and how long the next wait is."""
        self._idle_s = idle_s
        self._clock = clock
        self._state: State = "waiting" if self._may_move or not self.why_off else "off"
        self._error = ""
        self._progress = CalibrationProgress()
        self._learning: CalibrationProgress | None = None
        """Of the transform codings; None while none are learned."""
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._n_later = 0
        """Tokens of what is measured after the current part."""
        self._asked: _Asked | None = None
        self._found: Calibration | None = None
        self._thread = threading.Thread(target=self._run, name="towerd-calibrate", daemon=True)

    def start(self) -> None:
        """Apply a stored calibration, or the package's; without one, measure in idle time."""
        own = load_calibration(self._store, self._row_identity)
        self._found = own or packaged_calibration(self._core.info.row_identity)
        if self._found is not None:
            self._tiers.use(self._found)
        if self._transforms:
            self._transform = load_transform(self._store, self._row_identity)
            self._use_transform(self._transform)
        if self._may_move:
            self._tiers.moved_limits = load_moved_limits(self._store)
        has_any = self._found is not None or self._tiers.moved_limits is not None
        if has_any and not self._lacks_moves and not self._lacks_formats:
            self._state = "done"
        self._tiers.pause_transform(self._interrupt)
        self._thread.start()

    @property
    def _lacks_moves(self) -> bool:
        return self._may_move and self._tiers.moved_limits is None

    @property
    def _lacks_formats(self) -> bool:
        return not self.why_off and self._found is None

    @property
    def _lacks_transform(self) -> bool:
        return self._transforms and self._transform is None

    def close(self) -> None:
        """End a running calibration at its next step; it is continued after the next start."""
        self._stop.set()
        self._wake.set()
        self._thread.join()

    def request(self, *, again: bool, formats: bool = True) -> None:
        """Calibrate now, between requests, unless that has been done; with `again` in any case.
        formats: whether stored formats are measured as well as moved rows, which takes most of the time

        Raises NotSupported for a model whose rows cannot be measured."""
        if self._core.why_not_movable and not self._may_move:
            raise NotSupported(f"This model has nothing to calibrate: {self.why_off}.")
        if self._state != "running" and (again or self._state != "done"):
            self._asked = _Asked(again, formats)
            self._state, self._error, self._progress = "running", "", CalibrationProgress()
            self._wake.set()

    def view(self) -> dict[str, Any]:
        """For the API: `state`, `progress`, `calibration` and the table in force."""
        formats, limits = self._tiers.formats, self._tiers.moved_limits
        return {
            "state": self._state,
            "why": self._error or self.why_off,
            "fidelity": self.fidelity,
            "level_formats": str(formats) if formats is not None else None,
            "progress": self._progress.to_json(),
            "learning": None if (learning := self._learning) is None else learning.to_json(),
            "calibration": self._found.to_json() if self._found is not None else None,
            "row_identity": self._core.info.row_identity.to_json(),
            "moved": None if limits is None else limits.to_json(),
            "transform": self._transform.to_json() if self._transform is not None else None,
        }

    # ---- the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        if self._rotation.why_not:  # read here, before the first prompt asks
            self._may_move = False
        while not self._stop.is_set():
            if self._is_due():
                self._attempt()
            elif (wait_s := self._learning_s) == 0 and self._is_time():
                self._attempt_transform()
            else:
                self._wake.wait(wait_s)
                self._wake.clear()

    def _is_due(self) -> bool:
        """Whether a calibration was requested, or is needed and the engine has been idle."""
        if self._asked is not None:
            return True
        return self._state == "waiting" and self._has_been_idle()

    @property
    def _learning_s(self) -> float | None:
        """Seconds until transform codings may be learned; None: they are not."""
        if self._found is None or not self._lacks_transform:
            return None
        return max(0.0, self._learn_due - time.monotonic())

    def _is_time(self) -> bool:
        """Wait for time to learn transform codings; whether it came."""
        return self._has_been_idle() and self._asked is None and not self._stop.is_set()

    def _has_been_idle(self) -> bool:
        """Wait until the engine has been idle for long enough, or a calibration was requested; whether it was
        not stopped meanwhile."""
        idle_since, seen = time.monotonic(), -1
        while not (self._stop.is_set() or self._asked is not None):
            n_decoded = self._scheduler.counters["tokens_decoded"]
            if self._scheduler.is_busy or n_decoded != seen:
                idle_since, seen = time.monotonic(), n_decoded
            elif time.monotonic() - idle_since >= self._idle_s and self._has_ram:
                return True
            self._wake.wait(min(_POLL_S, self._idle_s))
        return self._asked is not None

    @property
    def _has_ram(self) -> bool:
        """Whether measuring would keep to the limit on RAM."""
        copied = _RAM_TOKENS * self._tiers.layout.token_bytes
        return self._tiers.ram.has_room(_RAM_BYTES + copied)

    def _attempt(self) -> None:
        asked, self._asked = self._asked, None
        again = asked is not None and asked.again
        formats = self._lacks_formats
        if asked is not None:
            lacks = again or self._found is None
            formats = asked.formats and lacks and not self._core.why_not_movable
        if again and asked is not None and asked.formats:
            self._transform = self._unsaved = None  # what is in force stays until there is another
            self._learn_due, self._learn_wait_s = 0.0, LEARN_RETRY_S[0]
        moves = self._may_move and (again or self._lacks_moves)
        self._state, self._error, self._progress = "running", "", CalibrationProgress()
        started = time.monotonic()
        try:
            failed = self._measure_all(moves=moves, formats=formats, again=again)
        except _CalibrationStopped:
            return
        except TowerdError as error:
            log.warning("calibration is not possible", extra={"reason": error.message})
            self._state, self._error = "failed", error.public
            return
        except Exception:
            log.exception("calibration failed")
            self._state, self._error = "failed", "internal error; the daemon's log has it"
            return
        self._progress = self._progress.expecting(0)
        self._state, self._error = ("failed", failed) if failed else ("done", "")
        log.info("calibrated", extra={"seconds": round(time.monotonic() - started, 1)})

    def _measure_all(self, *, moves: bool, formats: bool, again: bool) -> str:
        """Measure what is asked for, and continue what was measured of it before, unless `again`;
        why a part cannot be measured, or "". Raises TowerdError, _CalibrationStopped."""
        failed, plan = "", None
        if not self._has_ram:
            raise RamLimitReached(
                "Measuring takes more RAM than there is now: raise --ram-max, or try again later."
            )
        try:
            plan = self._plan() if formats else None
        except TowerdError as error:
            log.warning("stored formats cannot be measured", extra={"reason": error.message})
            failed = error.public
        unfinished = self._unfinished(plan)
        if again:
            unfinished.forget(moves=moves)
        try:
            if moves:
                self._n_later = 0 if plan is None else self._expected(plan, unfinished)
                try:
                    self._measure_moves(unfinished)
                except TowerdError as error:
                    log.warning("moved rows cannot be measured", extra={"reason": error.message})
                    failed = failed or error.public
            self._n_later = 0
            if plan is not None:
                found = self._measure(plan, unfinished)
                with suppress(DiskFull):  # it holds until the next start all the same
                    save_calibration(self._store, found)
                self._found = found
                self._tiers.use(found)
        except BaseException:
            unfinished.save()
            raise
        unfinished.forget(moves=moves)
        return failed

    def _unfinished(self, plan: MeasurePlan | None) -> Unfinished:
        core = self._core
        shapes = [shape.name for shape in other_shapes(core.context)]
        both = [str(VERSION), formats_digest(), calibration_text(), *shapes]
        formats_on = None if plan is None else [*both, plan.digest()]
        moves_on = [*both, str(core.n_ctx)]
        return Unfinished(self._store, self._row_identity, moves_on, formats_on)

    @property
    def _row_identity(self) -> str:
        return self._core.info.row_identity.digest().hex()

    def _scratch(self, advance: Callable[[int], None] | None = None) -> Scratch:
        """advance: told how many tokens were evaluated; None: it is progress of the calibration"""
        core, memory = self._core, self._core.memory
        return Scratch(
            core.context,
            memory.scratch,
            cell_ext=memory.layout.cell_ext,
            window=core.model.n_swa if memory.kind is WINDOW else 0,
            evaluated=advance or self._advance,
        )

    def _measure_moves(self, unfinished: Unfinished) -> None:
        """Measure what moved rows cost, and keep the limits that follow."""
        core, scratch = self._core, self._scratch()
        head = np.array([core.vocab.bos_id] if core.vocab.add_bos else [], np.int32)
        text = core.vocab.tokenize(calibration_text(), False, False)

        def line() -> SteppedSequence:
            return SteppedSequence(scratch, run_step=self._step, step_s=_STEP_S)

        meter = MovedMeter(line, self._rotation.moved, other_shapes(core.context))
        left = plan_changes(text, head, core.n_ctx)[len(unfinished.moves) :]
        while left:
            self._expect(sum(meter.n_tokens(changes) for changes in left))
            unfinished.moves.append(meter.measure(left.pop(0)))
            unfinished.save()
        limits = limits_of([each for run in unfinished.moves for each in run], self._row_identity)
        with suppress(DiskFull):  # they hold until the next start all the same
            save_moved_limits(self._store, limits)
        self._tiers.moved_limits = limits

    def _plan(self) -> MeasurePlan:
        """What is measured for stored formats. Raises TowerdError."""
        core = self._core
        plan = plan_for(core.vocab, calibration_text(), core.n_ctx, core.layout.token_bytes)
        if plan.n_cells > core.context.n_cells:
            raise TowerdError(
                f"It takes {plan.n_cells} cells; the live context has {core.context.n_cells}."
            )
        return plan

    def _measurer(self, plan: MeasurePlan, measured: Measured, unfinished: Unfinished) -> Measurer:
        return Measurer(
            self._scratch(),
            plan,
            run_step=self._step,
            step_s=_STEP_S,
            measured=measured,
            keep=unfinished.keep,
        )

    def _expected(self, plan: MeasurePlan, unfinished: Unfinished) -> int:
        """Tokens that measuring stored formats takes, about."""
        measurer = self._measurer(plan, unfinished.formats, unfinished)
        of_short = expected_of_ends(self._short_measurer(plan, unfinished))
        return expected_tokens(measurer, sizes(self._core.layout)) + of_short

    def _short_measurer(self, plan: MeasurePlan, unfinished: Unfinished) -> Measurer:
        # The shape that disturbs most was chosen on longer ones.
        unfinished.short.probed = unfinished.formats.probed
        return self._measurer(plan.of_short_chats(), unfinished.short, unfinished)

    def _measure(self, plan: MeasurePlan, unfinished: Unfinished) -> Calibration:
        bits = sizes(self._core.layout)
        measurer = self._measurer(plan, unfinished.formats, unfinished)
        self._n_later = expected_of_ends(self._short_measurer(plan, unfinished))
        floor, grid, choices = calibrate(measurer, bits, self._expect)
        self._n_later, short = 0, self._short_measurer(plan, unfinished)
        for i, (name, choice) in enumerate(choices.items()):
            self._expect(expected_of_ends(short, len(choices) - i))
            choices[name] = choose_ends(short, choice)
        return Calibration(
            row_identity=self._row_identity,
            formats=formats_digest(),
            ids=plan.digest(),
            made_unix=self._clock(),
            bits=bits,
            floor=floor,
            grid=grid,
            choices=choices,
        )

    def _attempt_transform(self) -> None:
        """Learn transform codings in what is left of the cores; later, if that fails for a reason that may
        pass."""
        lower_priority()
        try:
            self._learn_transform()
        except _CalibrationStopped:
            return
        except (StoreError, EigenFailed) as error:
            wait_s = self._learn_wait_s
            self._learn_due = time.monotonic() + wait_s
            self._learn_wait_s = min(2 * wait_s, LEARN_RETRY_S[1])
            log.warning(
                "transform codings are not learned yet: it is tried again later, in idle time",
                extra={"reason": str(error), "seconds": round(wait_s)},
            )
        except Exception:
            log.exception("transform codings cannot be learned")
            self._transforms = False
        finally:
            self._learning = None

    def _learn_transform(self) -> None:
        """Learn a basis, keep it, and use what keeps the bound. Raises _CalibrationStopped, EigenFailed,
        StoreError; what was learned is then kept at the next attempt."""
        if self._unsaved is None:
            self._unsaved = self._learned()
        choice, basis = self._unsaved
        if basis is not None:
            self._store.rows.bases.add(basis)
        save_transform(self._store, self._row_identity, choice)
        self._use_transform(choice)
        self._transform, self._unsaved = choice, None

    def _learned(self) -> tuple[TransformChoice, Basis | None]:
        """What is learned now, and its basis if any coding keeps the bound; what was learned before if this
        is not possible. Raises as `_learn_transform`."""
        text = calibration_text()
        cut = int(LEARNED_SHARE * len(text))
        vocab, core, found = self._core.vocab, self._core, self._found
        assert found is not None
        of = core.n_ctx, core.layout.token_bytes
        scratch = self._scratch(self._advance_learning)
        try:
            first = plan_for(vocab, text[:cut], *of, LEARN_CONTINUATIONS)
            second = plan_for(vocab, text[cut:], *of, MEASURED_MAX)
            learn_on = Measurer(scratch, first, run_step=self._step, step_s=_STEP_S)
            measure_on = Measurer(scratch, second, run_step=self._step, step_s=_STEP_S)
            self._expect_learning(expected_to_learn(learn_on, measure_on, core.layout))
            made = learn_transform(
                learn_on,
                measure_on,
                self._keys.rope(),
                found,
                self._core.info.row_identity.digest(),
                rot_k=self._core.info.row_identity.rot_k,
                eigh=self._eigh,
                pause=self._wait_for_idle,
                expect=self._expect_learning,
            )
        except StoreError:
            raise
        except TowerdError as error:
            log.info("rows are not transform-coded", extra={"reason": str(error)})
            before = load_transform(self._store, self._row_identity)
            why = TransformChoice(TRANSFORM_VERSION, "", 0, self._clock(), 0, {}, str(error))
            return (before if before is not None and before.choices else why), None
        basis = made.basis if made.choices else None
        choice = TransformChoice(
            TRANSFORM_VERSION,
            "" if basis is None else basis_name(basis.digest),
            made.n_tokens,
            self._clock(),
            made.basis.nbytes,
            made.choices,
        )
        return choice, basis

    def _use_transform(self, found: TransformChoice | None) -> None:
        if self._transforms:
            self._tiers.set_transform(None if found is None else found.choices.get(self.fidelity))

    def _eigh(
        self, matrix: npt.NDArray[np.float64]
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        return patient_eigh(matrix, lambda: self._scheduler.is_busy, self._check_stop)

    def _wait_for_idle(self) -> None:
        """Return when no request runs or waits. Raises _CalibrationStopped."""
        self._check_stop()
        while self._scheduler.is_busy:
            self._stop.wait(_LOOK_S)
            self._check_stop()

    def _interrupt(self) -> None:
        """Raises CodingInterrupted if a request runs or waits, or the daemon closes."""
        if self._scheduler.is_busy or self._stop.is_set():
            raise CodingInterrupted

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise _CalibrationStopped

    def _expect(self, n_tokens: int) -> None:
        """So much of this part will be evaluated from here on."""
        self._progress = self._progress.expecting(n_tokens + self._n_later)

    def _advance(self, n_tokens: int) -> None:
        self._progress = self._progress.advanced(n_tokens)

    def _expect_learning(self, n_tokens: int) -> None:
        self._learning = (self._learning or CalibrationProgress()).expecting(n_tokens)

    def _advance_learning(self, n_tokens: int) -> None:
        self._learning = (self._learning or CalibrationProgress()).advanced(n_tokens)

    # ---- steps on the inference thread ------------------------------------------------------

    def _step(self, work: Callable[[], T], n_cells: int) -> T:
        """Run `work` on the inference thread as soon as it is free. Raises _CalibrationStopped."""
        while not self._stop.is_set():
            answer = self._scheduler.call_with_room(work, n_cells, if_idle=True).result()
            if answer:
                return answer[0]
            self._stop.wait(_BUSY_S)
        raise _CalibrationStopped


def _why_off(core: Core, fidelity: str, forced: bool) -> str:
    """Why the cost of stored formats is not measured; "" if it is."""
    if core.why_not_movable:
        return core.why_not_movable
    if forced:
        return "the formats are set with --level-formats"
    if fidelity not in BOUNDS:
        return f"fidelity {fidelity} stores rows as they were computed"
    return ""


def calibration_text() -> str:
    """The text that every model is calibrated on: prose, dialogue, code, data, other languages."""
    return (files("towerd") / "data" / TEXT).read_text(encoding="utf-8")


def plan_for(
    vocab: Vocab, text: str, n_ctx: int, token_bytes: int, n_continuations: int = CONTINUATIONS_MAX
) -> MeasurePlan:
    """What to measure of `text` with a context of `n_ctx` tokens. Raises TowerdError."""
    return plan_measurement(
        vocab.tokenize(text, False, False),
        bos=vocab.bos_id if vocab.add_bos else None,
        window_tokens=n_ctx,
        token_bytes=token_bytes,
        n_continuations=n_continuations,
    )
