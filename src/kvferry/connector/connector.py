"""`KVFerryConnector`: vLLM's connector interface, split into its scheduler half and its worker half.

Hook order per step, and what is true when: see docs/journey.md. Written for vLLM 0.30 to 0.33.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from kvferry.auth import load_key
from kvferry.config import connector_config
from kvferry.connector.blocks import describe
from kvferry.connector.compat import (
    fingerprint,
    log_like_vllm,
    rank_and_size,
    stats_module,
    total_kv_heads,
    touch_pages,
    wanted_layout,
)
from kvferry.connector.metadata import StepMetadata
from kvferry.connector.scheduler_side import SchedulerSide
from kvferry.connector.worker_side import WorkerSide
from kvferry.errors import CompatError
from kvferry.ids import EngineId
from kvferry.story import Story, story_side
from kvferry.transfer.channel import ZmqChannel
from kvferry.transfer.peers import Identity

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

KVConnectorMetadata.register(StepMetadata)  # which itself knows nothing of vLLM
_stats = stats_module()


class KVFerryConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        log_like_vllm()
        transfer = vllm_config.kv_transfer_config
        config = connector_config(transfer.kv_connector_extra_config)
        groups = getattr(kv_cache_config, "transfer_groups", None) or kv_cache_config.kv_cache_groups
        if len(groups) > 1:
            raise CompatError(
                f"the model has {len(groups)} KV cache groups", hint="hybrid models are not supported yet"
            )
        rank, tp_size, dp_rank = rank_and_size(vllm_config, role is KVConnectorRole.WORKER)
        port = config.side_channel_port + dp_rank * tp_size
        config = connector_config({**transfer.kv_connector_extra_config, "side_channel_port": port})
        story = Story(config.story_dir or None, story_side(transfer.kv_role), rank)
        self._block_size = vllm_config.cache_config.block_size
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(
                config, transfer.kv_role, transfer.engine_id, tp_size, self._block_size, story
            )
        else:
            channel = ZmqChannel(config.side_channel_host, port + rank, load_key(config.auth_key_file))
            kind = transfer.kv_role.removeprefix("kv_")
            identity = Identity(EngineId(transfer.engine_id), rank, tp_size, kind)
            self._worker = WorkerSide(config, identity, channel, story)

    # -- worker -----------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        assert self._worker is not None
        touch_pages(kv_caches)
        heads = total_kv_heads(self._vllm_config)
        self._worker.start(describe(kv_caches, self._block_size, heads, fingerprint(self._vllm_config, kv_caches)))

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert self._worker is not None
        if isinstance(kv_connector_metadata, StepMetadata):
            self._worker.fence(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert self._worker is not None and isinstance(connector_metadata, StepMetadata)
        self._worker.bind(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads were handed over in `bind_connector_metadata`, before the forward."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request runs here only when all its KV has landed."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Planes may leave in groups before the forward is done; otherwise two comparisons."""
        assert self._worker is not None
        if self._worker.next_mark:
            self._worker.layer_done(layer_name)

    def wait_for_save(self) -> None:
        assert self._worker is not None
        self._worker.forward_done()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        assert self._worker is not None
        sent, received, failed = self._worker.results()
        return KVConnectorTransferResults(set(sent), set(received), set(failed))

    def get_kv_connector_stats(self) -> Any:
        """Once per step: mostly nothing."""
        record = None if self._worker is None else self._worker.stats()
        return None if record is None or _stats is None else _stats.KVFerryStats.of(record)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()

    # -- scheduler --------------------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        assert self._scheduler is not None
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self._scheduler is not None
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert self._scheduler is not None
        self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        assert self._scheduler is not None
        return self._scheduler.build(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        assert self._scheduler is not None
        if connector_output.finished_sending or connector_output.finished_recving:
            self._scheduler.update(connector_output)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        return self._scheduler.finished(request, block_ids[0] if block_ids else [])

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        return self._scheduler.finished(request, block_ids)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """Every group: blocks that a peer may be writing to must not be zeroed."""
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    # -- class level ------------------------------------------------------------------------------------------------

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        return None if _stats is None else _stats.KVFerryStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> Any:
        made = (vllm_config, metric_types, labelnames, per_engine_labelvalues)
        return None if _stats is None else _stats.KVFerryPromMetrics(*made)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        config = connector_config(extra_config)
        return config.mode == "stream" and config.stream_layers

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        return wanted_layout(vllm_config)
