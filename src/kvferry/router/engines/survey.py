"""What an engine's `/metrics` tell of how it is built: data-parallel ranks, and how much its prefix cache holds.

Asked whenever an engine comes up. One that tells nothing is taken as it was described on the command line.
"""

from __future__ import annotations

import re

import msgspec

from kvferry.errors import PeerUnreachable
from kvferry.router.http.upstream import Upstream

TIMEOUT_S = 2.0
_CONFIG = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_RUNNING = re.compile(r"^vllm:num_requests_running\{(.*)\}", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
MOST_RANKS = 1024


class Build(msgspec.Struct, frozen=True, kw_only=True):
    """`ranks`: data-parallel ones behind this port. `prefix_tokens`: what the KV pool of one holds, 0: not told.
    `caches`: whether prompts are cached at all."""

    ranks: int = 1
    prefix_tokens: int = 0
    caches: bool = True


def read(text: str) -> Build:
    """From a page in Prometheus' text format."""
    running = [dict(_LABEL.findall(labels)) for labels in _RUNNING.findall(text)]
    ranks = {labels["engine"] for labels in running if "engine" in labels}
    config = next((dict(_LABEL.findall(labels)) for labels in _CONFIG.findall(text)), {})
    blocks, size = config.get("num_gpu_blocks", ""), config.get("block_size", "")
    return Build(
        ranks=min(len(ranks) or 1, MOST_RANKS),
        prefix_tokens=int(blocks) * int(size) if blocks.isdecimal() and size.isdecimal() else 0,
        caches=config.get("enable_prefix_caching", "True") != "False",
    )


async def survey(url: str, upstream: Upstream, api_key: str) -> Build | None:
    """None: it has no such page, or not in time."""
    try:
        page = await upstream.get(url, "/metrics", api_key, TIMEOUT_S)
    except PeerUnreachable:
        return None
    return read(page.body.decode("utf-8", "replace")) if page.status == 200 else None
