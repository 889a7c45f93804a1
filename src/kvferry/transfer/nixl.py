"""The fabric over NIXL. The only module that imports nixl.

The agent runs without its progress thread: that thread spins, and on two cores it takes a core from prefill. The
transfer thread drives the agent itself, and only while something is in flight.
"""

from __future__ import annotations

import importlib
import os
import secrets
import sys
from typing import Any

import numpy as np

from kvferry.errors import ConfigError, FabricError
from kvferry.transfer.agents import Agents
from kvferry.transfer.fabric import Addresses, Handle, Note, Op, PeerName

_MODULES = ("nixl", "nixl_cu13", "nixl_cu12", "nixl_rocm")
"""`nixl` loads torch (a second) to choose among the others, so without torch it comes last: on CPUs any will do."""


def _load() -> Any:
    os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")  # else UCX may grow without bound, as vLLM notes
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    for name in _MODULES if "torch" in sys.modules else (*_MODULES[1:], _MODULES[0]):
        try:
            return importlib.import_module(f"{name}._api")
        except ImportError:
            continue
    raise ConfigError("NIXL is not installed", hint="pip install nixl-cu12 (it also works without a GPU), or nixl")


def _seg(device: str) -> tuple[str, int]:
    kind, _, index = device.partition(":")
    return ("DRAM", 0) if kind == "cpu" else ("VRAM", int(index or 0))


class NixlFabric:
    """`backends`: NIXL plugins, in order of preference. `name` need not be unique; the agent's name is."""

    def __init__(self, name: str, backends: tuple[str, ...] = ("UCX",), num_threads: int = 0) -> None:
        self._api = api = _load()
        self._given, self._backends, self._num_threads = name, list(backends), num_threads
        bindings = importlib.import_module(api.__name__.replace("_api", "_bindings"))
        # NIXL's exceptions have no base of their own: each is a direct child of Exception.
        found = [one for one in vars(bindings).values() if isinstance(one, type) and issubclass(one, Exception)]
        self._errors: tuple[type[Exception], ...] = (*found, RuntimeError, ValueError)
        self._registered: list[Any] = []
        self._memory: list[tuple[list[tuple[int, int]], str]] = []
        self._device = "cpu"
        self._closed = False
        self.touched = 0
        self._posted: dict[Handle, PeerName] = {}  # and not released
        self._agent = self._make_agent()
        self._agents = Agents(self._load_agent, self._remove_agent)

    def _make_agent(self) -> Any:
        config = self._api.nixl_agent_config(
            enable_prog_thread=False, num_threads=self._num_threads, backends=self._backends
        )
        named = ", ".join(self._backends)
        try:
            agent = self._api.nixl_agent(f"{self._given}-{secrets.token_hex(6)}", config)
        except self._errors as error:
            raise FabricError(f"NIXL agent did not start with backends {named}: {error}") from error
        if not agent.backends:
            hint = f"it has: {', '.join(agent.plugin_list)}"
            raise FabricError(f"NIXL has none of the backends {named}", hint=hint)
        return agent

    def register(self, regions: list[tuple[int, int]], device: str) -> None:
        mem_type, index = _seg(device)
        self._device = device
        rows = [(address, nbytes, index, "") for address, nbytes in regions]
        try:
            self._registered.append(self._agent.register_memory(rows, mem_type))
            self._memory.append((regions, device))
        except self._errors as error:
            raise FabricError(f"NIXL could not register {len(rows)} regions of {device}: {error}") from error

    def metadata(self) -> bytes:
        return bytes(self._agent.get_agent_metadata())

    def add_peer(self, metadata: bytes) -> PeerName:
        self.touched += 1
        return self._agents.add(metadata)

    def remove_peer(self, peer: PeerName) -> None:
        self.touched += 1
        self._agents.let_go(peer)

    def _load_agent(self, metadata: bytes) -> PeerName:
        try:
            name = self._agent.add_remote_agent(metadata)
        except self._errors as error:
            raise FabricError(f"NIXL could not add the peer's agent: {error}") from error
        return name.decode() if isinstance(name, bytes) else str(name)

    def _remove_agent(self, peer: PeerName) -> None:
        try:
            self._agent.remove_remote_agent(peer)
        except self._errors:
            return  # not known (any more): nothing to remove

    def post(
        self,
        op: Op,
        peer: PeerName,
        local: Addresses,
        remote: Addresses,
        nbytes: Addresses,
        remote_device: str,
        note: bytes = b"",
    ) -> Handle:
        self.touched += 1
        if self._agents.at_rest(peer):
            raise FabricError(f"NIXL {op} to {peer} could not be posted: not a peer")
        local_type, local_index = _seg(self._device)
        remote_type, remote_index = _seg(remote_device)
        mine = np.column_stack((local, nbytes, np.full_like(local, local_index)))
        theirs = np.column_stack((remote, nbytes, np.full_like(remote, remote_index)))
        try:
            handle = self._agent.initialize_xfer(
                op,
                self._agent.get_xfer_descs(mine, local_type),
                self._agent.get_xfer_descs(theirs, remote_type),
                peer,
                note,
            )
            state = self._agent.transfer(handle)
        except self._errors as error:
            self._agents.failed(peer)
            raise FabricError(f"NIXL {op} to {peer} could not be posted: {error}") from error
        if state == "ERR":
            self.release(handle)
            self._agents.failed(peer)
            raise FabricError(f"NIXL {op} to {peer} was refused")
        self._posted[handle] = peer
        return handle  # type: ignore[no-any-return]

    def repost(self, handle: Handle) -> None:
        self.touched += 1
        try:
            state = self._agent.transfer(handle)
        except self._errors as error:
            self._has_failed(handle)
            raise FabricError(f"NIXL transfer could not be posted again: {error}") from error
        if state == "ERR":
            self._has_failed(handle)
            raise FabricError("NIXL transfer was refused when it was posted again")

    def check(self, handle: Handle) -> bool:
        self.touched += 1
        try:
            state = self._agent.check_xfer_state(handle)
        except self._errors as error:
            self._has_failed(handle)
            raise FabricError(f"NIXL transfer failed: {error}") from error
        if state == "ERR":
            self._has_failed(handle)
            raise FabricError("NIXL transfer failed")
        return bool(state == "DONE")

    def _has_failed(self, handle: Handle) -> None:
        if handle in self._posted:
            self._agents.failed(self._posted[handle])

    def release(self, handle: Handle) -> None:
        self.touched += 1
        self._posted.pop(handle, None)
        try:
            self._agent.release_xfer_handle(handle)
        except self._errors:
            return  # already gone with its peer

    def progress(self) -> list[Note]:
        self.touched += 1
        try:
            came = self._agent.get_new_notifs()
        except self._errors as error:
            raise FabricError(f"NIXL progress failed: {error}") from error
        return [(agent, note) for agent, notes in came.items() for note in notes] if came else []

    def renew(self) -> None:
        self._let_go()
        memory, self._memory = self._memory, []
        self._agent = self._make_agent()
        self._agents = Agents(self._load_agent, self._remove_agent)
        for regions, device in memory:
            self.register(regions, device)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._let_go()

    def _let_go(self) -> None:
        for registered in self._registered:
            try:
                self._agent.deregister_memory(registered)
            except self._errors:
                continue
        self._registered.clear()
        self._posted.clear()
        del self._agent
