"""TowerdConnector: vLLM's KV connector with this store below it.

vllm serve MODEL --kv-transfer-config '{"kv_connector": "TowerdConnector",
    "kv_connector_module_path": "towerd.connectors.vllm", "kv_role": "kv_both",
    "kv_connector_extra_config": {"towerd.store_dir": "/var/lib/towerd-vllm"}}'
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)

from towerd.connectors.vllm.operations import ReadPlanes, RowLoad, RowSave
from towerd.connectors.vllm.scheduler_side import SchedulerSide
from towerd.connectors.vllm.settings import ConnectorSettings
from towerd.connectors.vllm.vllm_store import VllmStore
from towerd.connectors.vllm.worker_side import WorkerSide
from towerd.errors import ConfigError


class StepRows(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not there where types are checked
    """What the worker does in one step."""

    def __init__(self, loads: list[RowLoad], saves: list[RowSave], number: int) -> None:
        self.loads, self.saves, self.number = loads, saves, number


class RowsRead(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What the worker read in one step, and the step's number."""

    def __init__(self, read: list[ReadPlanes], number: int) -> None:
        self.read, self.number = read, number

    def aggregate(self, other: RowsRead) -> RowsRead:
        """What both have; an engine of this connector has one worker."""
        return RowsRead(self.read + other.read, self.number)


class TowerdConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """One side of the connector: vLLM makes one for its scheduler and one for its worker."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_engine(vllm_config)
        transfer = vllm_config.kv_transfer_config
        self._store: VllmStore | None = None
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            settings = ConnectorSettings.of(transfer.kv_connector_extra_config)
            self._store = VllmStore(settings, vllm_config, kv_cache_config)
            self._scheduler = SchedulerSide(
                self._store,
                kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size,
                kv_cache_config.num_blocks,
                loads=transfer.is_kv_consumer,
                saves=transfer.is_kv_producer,
            )
        else:
            model = vllm_config.compilation_config
            self._worker = WorkerSide(kv_cache_config, lambda: model.static_forward_context)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: what is not saved is evaluated again."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """True: rows are loaded and read layer by layer."""
        return True

    def shutdown(self) -> None:
        """Write what is not on disk yet, and close the store."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
        if self._scheduler is not None:
            self._scheduler.close()
        store, self._store = self._store, None
        if store is not None:
            store.close()

    # --- the scheduler's side ---------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """See the base class. Rows are loaded within the step that uses them: never asynchronously."""
        assert self._scheduler is not None
        return self._scheduler.n_matched(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See the base class."""
        assert self._scheduler is not None
        self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepRows:
        """See the base class."""
        assert self._scheduler is not None
        loads, saves = self._scheduler.plan_step(scheduler_output)
        number = self._scheduler.time_step(scheduler_output, is_loading=bool(loads))
        return StepRows(loads, saves, number)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See the base class."""
        assert self._scheduler is not None
        return self._scheduler.ended(request, block_ids), None

    def update_connector_output(self, connector_output: Any) -> None:
        """See the base class."""
        assert self._scheduler is not None
        read = connector_output.kv_connector_worker_meta
        if isinstance(read, RowsRead):
            self._scheduler.have_read(read.read)
        self._scheduler.step_ended(read.number if isinstance(read, RowsRead) else 0)

    def reset_cache(self) -> bool:
        """See the base class. vLLM calls this when its weights may have changed."""
        if self._scheduler is not None:
            self._scheduler.stop()
        return True

    # --- the worker's side ------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """See the base class."""
        assert self._worker is not None
        self._worker.register(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """See the base class."""
        assert self._worker is not None
        self._worker.start_load(self._step.loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """See the base class."""
        assert self._worker is not None
        self._worker.wait_for_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """See the base class."""
        assert self._worker is not None
        self._worker.save_layer(layer_name, self._step.saves)

    def wait_for_save(self) -> None:
        """See the base class. Rows are in RAM then, and vLLM may use their blocks again."""
        assert self._worker is not None
        self._worker.finish_step(self._step.saves)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """See the base class."""
        assert self._worker is not None
        return self._worker.take_ended() or None, None

    def build_connector_worker_meta(self) -> RowsRead | None:
        """See the base class."""
        assert self._worker is not None
        read, number = self._worker.take_read(), self._step.number
        return RowsRead(read, number) if read or number else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """See the base class."""
        assert self._worker is not None
        return self._worker.failed_blocks()

    @property
    def _step(self) -> StepRows:
        found = self._get_connector_metadata()
        assert isinstance(found, StepRows)
        return found


def check_engine(vllm_config: Any) -> None:
    """Raises ConfigError for an engine whose rows the connector cannot keep."""
    n = vllm_config.parallel_config.world_size
    if n != 1:
        raise ConfigError(
            f"This engine has {n} workers; towerd's connector keeps the rows of one: use "
            "tensor_parallel_size=1 and pipeline_parallel_size=1."
        )
    if vllm_config.speculative_config is not None:
        raise ConfigError("towerd's connector does not keep the rows of a speculating engine.")
