"""The scheduler's half of the connector: decides per request what the workers' transfer threads are told.

Thread: the engine's main thread only. Nothing here does I/O (but story lines) or waits. All work per hook is slicing
of lists and appends to the next step's metadata.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from kvferry.config import ConnectorConfig
from kvferry.connector.hooks import take_ms, timed
from kvferry.connector.invariants import check_scheduler_side
from kvferry.connector.metadata import IDLE, NOTHING, Reject, StepMetadata
from kvferry.connector.params import LandingParams, SourceParams, parse
from kvferry.errors import ConfigError
from kvferry.ids import TransferId, new_transfer_id
from kvferry.protocol.prompt import mark_prompt, prompt_digest
from kvferry.story import Story
from kvferry.transfer.commands import Abort, Drop, Expect, Grown, Land, Ready, Rewind, Wait

log = logging.getLogger("kvferry.connector")


@dataclass
class _Source:
    """A request on P whose KV somebody wants."""

    request: Any
    params: SourceParams
    streams: bool = False  # KV is handed over as it is computed
    streamed: int = 0  # scheduler blocks handed over so far
    handed: bool = False  # Ready is on its way or was
    finished: bool = False  # the engine is done with it and holds its blocks for us
    released: bool = False  # the workers are done with it


@dataclass
class _Landing:
    """A request on D whose KV comes from elsewhere. `params` None: they were bad; `reason` says how."""

    params: LandingParams | None
    reason: str = ""
    allocated: bool = False
    received: bool = False


class SchedulerSide:
    def __init__(
        self, config: ConnectorConfig, role: str, engine_id: str, tp_size: int, block_size: int, story: Story
    ) -> None:
        self.config, self.role, self.engine_id, self.tp_size = config, role, engine_id, tp_size
        self.block_size = block_size
        self.hook_s = self.told_hook_s = 0.0
        self._story = story
        self._sources: dict[str, _Source] = {}
        self._transfer_ids: set[TransferId] = set()
        self._landings: dict[str, _Landing] = {}
        self._kept: set[str] = set()  # ended on D while somebody may still write to their blocks
        self._arrived: list[str] = []  # landings that came since the last step
        self._next = StepMetadata()
        self._live: set[str] | None = set() if config.debug_invariants else None  # requests of any kind

    # -- a request comes in -----------------------------------------------------------------------------------------

    @timed
    def on_new_request(self, request: Any) -> None:
        if self._live is not None:
            self._live.add(request.request_id)
        try:
            params = parse(request.kv_transfer_params)
        except ConfigError as error:
            log.error("%s: request %s: %s", self.engine_id, request.request_id, error)
            if request.kv_transfer_params.get("do_remote_prefill"):
                self._landings[request.request_id] = _Landing(None, str(error))
            return
        if isinstance(params, LandingParams):
            if self.role == "kv_producer":
                reason = f"{self.engine_id} is a kv_producer and takes no KV"
                self._landings[request.request_id] = _Landing(None, reason)
            else:
                self._landings[request.request_id] = _Landing(params)
                self._arrived.append(request.request_id)
        elif isinstance(params, SourceParams):
            if self.role == "kv_consumer":
                log.error("%s: request %s: a kv_consumer sends no KV", self.engine_id, request.request_id)
            elif params.transfer_id in self._transfer_ids:
                log.error("%s: transfer id %s is in use; the second is ignored", self.engine_id, params.transfer_id)
            else:
                mode = params.mode or self.config.mode
                self._sources[request.request_id] = _Source(request, params, mode == "stream")
                self._transfer_ids.add(params.transfer_id)
                self._next.news = True
                ids = request.prompt_token_ids
                expect = Expect(
                    transfer_id=params.transfer_id,
                    request=request.request_id,
                    mode=mode,
                    fan_out=params.fan_out,
                    num_tokens=request.num_prompt_tokens,
                    prompt=mark_prompt(ids) if ids else None,
                )
                self._next.expects.append(expect)

    # -- decode -----------------------------------------------------------------------------------------------------

    @timed
    def matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens that come from elsewhere, beyond the `num_computed_tokens` found here. No side effects.

        All but the last prompt token: that one is computed here, for its logits.
        """
        landing = self._landings.get(request.request_id)
        if landing is None or landing.allocated:
            return 0, False
        external = request.num_prompt_tokens - 1 - num_computed_tokens
        return (external, True) if external > 0 else (0, False)

    @timed
    def allocated(self, request: Any, block_ids: list[int], num_external_tokens: int) -> None:
        """`block_ids`: the request's whole table. The engine's word on what is external counts, not our offer."""
        landing = self._landings.get(request.request_id)
        if landing is None or landing.allocated:
            return
        landing.allocated = True
        if landing.params is None:
            if num_external_tokens > 0:
                reject = Reject(request.request_id, new_transfer_id(), "bad_parameters", landing.reason)
                self._next.news = True
                self._next.rejects.append(reject)
            else:
                landing.received = True
            return
        end = request.num_prompt_tokens - 1
        start = end - num_external_tokens if num_external_tokens > 0 else end
        first, last = start // self.block_size, -(-end // self.block_size)
        wanted = tuple(block_ids[first:last]) if num_external_tokens > 0 else ()
        landing.received = num_external_tokens <= 0
        self._land(request, landing.params, start, end, wanted)

    def _land(self, request: Any, params: LandingParams, start: int, end: int, block_ids: tuple[int, ...]) -> None:
        ids = request.prompt_token_ids if start < end else None
        land = Land(
            transfer_id=params.transfer_id,
            request=request.request_id,
            mode=params.mode or self.config.mode,
            host=params.remote_host.strip("[]"),
            port=params.remote_port,
            engine_id=params.remote_engine_id,
            tp_size=params.remote_tp_size,
            start_token=start,
            end_token=end,
            block_ids=block_ids,
            prompt=prompt_digest(ids[:end]) if ids else "",
        )
        self._next.news = True
        self._next.lands.append(land)

    # -- each step --------------------------------------------------------------------------------------------------

    @timed
    def build(self, output: Any) -> StepMetadata:
        """Called once per step, after scheduling; `request.num_computed_tokens` doesn't include this step yet."""
        if self._live is not None:
            check_scheduler_side(self, self._live)
        if self._arrived:
            self._announce_queued()
        scheduled_any = bool(output.total_num_scheduled_tokens)
        if not self._next.news and not (self._sources and (scheduled_any or output.preempted_req_ids)):
            # Most steps: a request waits, or tokens are made of what has landed. Keep it cheap.
            return IDLE if not scheduled_any and self._anything_open() else NOTHING
        step, self._next = self._next, StepMetadata()
        state = output.kv_connector_block_state
        for request_id in output.preempted_req_ids or ():
            source = self._sources.get(request_id)
            if source is None:
                continue
            if source.streamed and not source.handed:
                source.streamed = 0
                step.news = True
                step.fences.append(Rewind(source.params.transfer_id, request_id))
            elif source.handed and not source.finished and not source.released:
                reason = "preempted on the prefill engine after its KV was handed over"
                step.news = True
                step.fences.append(Abort(source.params.transfer_id, request_id, reason))
        for request_id, scheduled in output.num_scheduled_tokens.items():
            source = self._sources.get(request_id)
            if source is None or source.handed:
                continue
            request = source.request
            prompt = request.num_prompt_tokens
            computed = min(request.num_computed_tokens + scheduled, prompt)
            # With more than one token to make, the request runs on and may be preempted: hand over when it finishes.
            last = request.max_tokens == 1 and computed == prompt
            if not (last or source.streams) or state is None or (blocks := state.get_block_ids(request_id)) is None:
                continue
            needed = -(-computed // self.block_size)
            if last:
                source.handed = True
                ready = Ready(source.params.transfer_id, request_id, tuple(blocks[0][:needed]), prompt)
                step.readies.append(ready)
                if source.streams and self.config.stream_layers:
                    new = ready.block_ids[source.streamed :]
                    step.parts.append(Grown(source.params.transfer_id, request_id, new, prompt))
            elif needed > source.streamed:
                new = tuple(blocks[0][source.streamed : needed])
                step.grown.append(Grown(source.params.transfer_id, request_id, new, computed))
                source.streamed = needed
        step.idle = not scheduled_any and self._anything_open()
        return step

    def _announce_queued(self) -> None:
        """P must not give up on requests that got no blocks in their first step here."""
        for request_id in self._arrived:
            landing = self._landings.get(request_id)
            if landing is not None and landing.params is not None and not landing.allocated:
                params = landing.params
                self._next.news = True
                self._next.waits.append(Wait(params.transfer_id, params.remote_host.strip("[]"), params.remote_port))
        self._arrived.clear()

    def _anything_open(self) -> bool:
        return (
            bool(self._kept)
            or any(not landing.received for landing in self._landings.values() if landing.allocated)
            or any(source.finished and not source.released for source in self._sources.values())
        )

    @timed
    def update(self, output: Any) -> None:
        """`output.finished_*`: ids that every worker has reported. The scheduler reads them after us."""
        self._kept.difference_update(output.finished_recving or ())
        for request_id in output.finished_recving or ():
            landing = self._landings.get(request_id)
            if landing is not None:
                landing.received = True
        early = set()
        for request_id in output.finished_sending or ():
            source = self._sources.get(request_id)
            if source is None or not source.finished:
                early.add(request_id)  # the engine hasn't given us its blocks (yet): nothing to free
            if source is not None:
                source.released = True
                if source.finished:
                    self._forget_source(request_id)
        if early:
            output.finished_sending = output.finished_sending - early

    # -- a request ends ---------------------------------------------------------------------------------------------

    @timed
    def finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """(whether the engine must keep the blocks until the workers say so, what the client gets)."""
        request_id = request.request_id
        if self._live is not None:
            self._live.discard(request_id)
        landing = self._landings.pop(request_id, None)
        if landing is not None:
            if landing.params is not None:
                if not landing.allocated:  # aborted while queued: P must still be told
                    end = request.num_prompt_tokens
                    self._land(request, landing.params, end, end, ())
                elif not landing.received:
                    self._next.news = True
                    self._next.drops.append(Drop(request_id))
                    self._kept.add(request_id)
                self._note_hooks(landing.params.transfer_id)
            return False, None
        source = self._sources.get(request_id)
        if source is None:
            return False, None
        params, prompt = source.params, request.num_prompt_tokens
        source.finished = True
        if not source.handed:
            if request.num_computed_tokens < prompt or not block_ids:
                reason = f"the request ended on the prefill engine before its prompt was computed ({request.status})"
                self._next.news = True
                held = source.streamed > 0 and not source.released  # WRITEs may read its blocks still
                self._next.aborts.append(Abort(params.transfer_id, request_id, reason, held))
                if held:
                    return True, None
                self._forget_source(request_id)
                return False, None
            source.handed = True
            blocks = tuple(block_ids[: -(-prompt // self.block_size)])
            self._next.news = True
            self._next.finished.append(Ready(params.transfer_id, request_id, blocks, prompt))
        self._note_hooks(params.transfer_id)
        reply = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": params.transfer_id,
            "mode": params.mode or self.config.mode,
            "remote_engine_id": self.engine_id,
            "remote_host": self.config.side_channel_host,
            "remote_port": self.config.side_channel_port,
            "remote_tp_size": self.tp_size,
        }
        if source.released:
            self._forget_source(request_id)
            return False, reply
        return True, reply

    def _forget_source(self, request_id: str) -> None:
        source = self._sources.pop(request_id)
        self._transfer_ids.discard(source.params.transfer_id)

    def _note_hooks(self, transfer_id: TransferId) -> None:
        if self._story.on:
            self._story.note(transfer_id, "hooks", part="scheduler", ms=take_ms(self))
