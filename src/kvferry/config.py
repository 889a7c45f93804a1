"""What a user may set in `kv_connector_extra_config`. Frozen, strict: an unknown key names its nearest known one."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

import msgspec

from kvferry.errors import ConfigError, unknown_name
from kvferry.protocol.messages import Mode, PullBy, Verify

DEFAULT_SIDE_CHANNEL_PORT = 5600  # vLLM's own NIXL default


Staging = Literal["auto", "always", "off"]


class ConnectorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times in seconds. Each default is stated here only."""

    mode: Mode = "push"
    """Who posts: 'push' = prefill WRITEs when the prompt is computed, 'stream' = while it is being computed, 'pull' =
    decode takes it when the prompt is computed. A request may name its own; both sides must agree."""

    pull_by: PullBy = "auto"
    """Pull: who moves the bytes. 'read' = decode READs, 'write' = prefill WRITEs as in push, 'auto' = decode READs if
    its READs are seen to need no help of the prefill process: where a transport emulates them, as TCP does, UCX ends
    that process if decode dies in the middle of one. Of the two sides' settings 'write' goes before 'read'."""

    background: bool = True
    """False (pull on the decode side only): plan, post and poll inside the engine loop, as upstream's pull does."""

    stream_chunk_bytes: int = 0
    """Stream: less than this, of one rank's KV, is not sent on its own while prefill runs. 0: as much as takes four
    times what its post alone costs, by what the transfers so far took."""

    stream_layers: bool = True
    """Stream: a step that ends a prompt hands its layers over in groups, as they are computed, where its KV is worth
    several WRITEs. On GPUs it makes vLLM use piecewise CUDA graphs: the hooks of layers don't run in full ones."""

    stream_write_bytes: int = 256 << 20
    """Stream: at most this much in one WRITE."""

    staging: Staging = "auto"
    """Push and stream: KV in many small pieces is gathered into slots of a registered area, written slot by slot, and
    scattered by decode. 'auto': where that was faster, by what the transfers so far took."""

    staging_bytes: int = 64 << 20
    """Size of that area, in each rank: 16 slots, 3 of them for one transfer at a time."""

    side_channel_host: str = ""
    """Address to listen on and to be reached at. Empty: $VLLM_NIXL_SIDE_CHANNEL_HOST, else 127.0.0.1."""

    side_channel_port: int = 0
    """Port of rank 0; rank r listens on port + r. 0: $VLLM_NIXL_SIDE_CHANNEL_PORT, else 5600."""

    auth_key_file: str = ""
    """File with the key that all engines and routers of a deployment share. Empty: $KVFERRY_AUTH_KEY_FILE, else the key
    itself in $KVFERRY_AUTH_KEY, else none; then side_channel_host must be loopback."""

    peers: tuple[str, ...] = ()
    """Prefill side channels, 'host:port', that a decode engine connects to at start, off the first request's path."""

    lease_s: float = 30.0
    """Prefill keeps a finished request's blocks this long for a decode engine to come (`prefill_timeout_s` while one
    says that its request queues for blocks); also the silence after which
    either side takes the other for dead. vLLM's NIXL lease is 30 s too."""

    registration_timeout_s: float = 30.0
    """A registration waits this long at prefill for its request to show up there (router queues included)."""

    connect_timeout_s: float = 4.0
    """For a decode rank to reach a prefill rank it isn't connected to; short, since a request waits."""

    prefill_timeout_s: float = 300.0
    """From registration until prefill delivers: queueing and computing included."""

    transfer_timeout_s: float = 60.0
    """From the first post until everything has landed."""

    idle_wait_ms: float = 50.0
    """Longest sleep of a decode engine's step that has no model work while a request waits for its KV; the KV's landing
    cuts it short. A request that comes meanwhile registers this much later at most, behind the prefill that is being
    waited for. At most 5 on a prefill engine. vLLM alone would step a thousand times a second."""

    verify_kv: Verify = "sample"
    """What is compared between what prefill computed and what landed, before the first token: 'full' = every byte,
    'sample' = two tokens of every layer, spread over the prompt. The weaker setting of the two sides holds. Default:
    'sample' takes some tenths of a millisecond, 'full' reads 3 to 4 GB/s on a CPU core."""

    backends: tuple[str, ...] = ("UCX",)
    """NIXL backends."""

    num_threads: int = 0
    """NIXL backend worker threads; 0: none, our transfer thread drives the agent."""

    story_dir: str = ""
    """Folder for per-transfer event lines (see `kvferry story`). Empty: off."""

    quarantine_share: float = 0.5
    """Blocks of failed requests stay until their writer is heard of. If writers that aren't hold more than this share
    of the decode engine's blocks for `lease_s`, it makes a new NIXL agent, which nothing old can reach, and greets all
    peers anew; other transfers to it that are under way then fail."""

    debug_invariants: bool = False
    """Whenever nothing is open, look whether anything was left behind, and end the engine if so. For tests."""

    audit: bool = False
    """Write a SHA-256 of every transferred block to the story on both sides. For tests: reads all bytes twice."""

    @property
    def pull_by_now(self) -> PullBy:
        """What posts in the engine loop, as vLLM's pull does, reads as that does."""
        return self.pull_by if self.background else "read"

    @property
    def staging_area_bytes(self) -> int:
        return 0 if self.staging == "off" else self.staging_bytes


def _fields() -> list[str]:
    return [field.name for field in msgspec.structs.fields(ConnectorConfig)]


def _wrong_value(extra: Mapping[str, Any], error: msgspec.ValidationError) -> ConfigError:
    """msgspec's complaint in our words: the field, the value, what was expected."""
    path = re.search(r"\$\.(\w+)", str(error))
    types = {field.name: field.type for field in msgspec.structs.fields(ConnectorConfig)}
    if path is None or path[1] not in types:
        return ConfigError(f"kv_connector_extra_config: {error}", hint="see docs/configuration.md")
    name, value = path[1], extra[path[1]]
    kind = types[name]
    if get_origin(kind) is Literal:
        near = difflib.get_close_matches(str(value), get_args(kind), n=1)
        hint = f"expected one of {', '.join(get_args(kind))}" + (f"; did you mean {near[0]!r}?" if near else "")
    else:
        hint = "expected a list of str" if get_origin(kind) is tuple else f"expected {kind.__name__}"
    return ConfigError(f"{name}: {value!r}", hint=hint)


def connector_config(extra: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> ConnectorConfig:
    """Read and check `kv_connector_extra_config`. Raises `ConfigError` naming field, value and what was expected."""
    for key in extra:
        if key not in _fields():
            raise unknown_name("kv_connector_extra_config", key, _fields())
    try:
        config = msgspec.convert(dict(extra), ConnectorConfig)
    except msgspec.ValidationError as error:
        raise _wrong_value(extra, error) from None
    host = config.side_channel_host or environ.get("VLLM_NIXL_SIDE_CHANNEL_HOST", "") or "127.0.0.1"
    port = config.side_channel_port or int(environ.get("VLLM_NIXL_SIDE_CHANNEL_PORT", "0")) or DEFAULT_SIDE_CHANNEL_PORT
    config = msgspec.structs.replace(config, side_channel_host=host.strip("[]"), side_channel_port=port)
    if not 0 < port < 65536:
        raise ConfigError(f"side_channel_port: {port}", hint="expected 1 to 65535")
    for name in ("lease_s", "registration_timeout_s", "connect_timeout_s", "prefill_timeout_s", "transfer_timeout_s"):
        if getattr(config, name) <= 0:
            raise ConfigError(f"{name}: {getattr(config, name)}", hint="expected seconds above 0")
    if not 0 < config.quarantine_share <= 1:
        raise ConfigError(f"quarantine_share: {config.quarantine_share}", hint="expected a share above 0, at most 1")
    if not 0 <= config.idle_wait_ms <= 1000:
        raise ConfigError(f"idle_wait_ms: {config.idle_wait_ms}", hint="expected 0 to 1000")
    if config.staging_bytes < 0:
        raise ConfigError(f"staging_bytes: {config.staging_bytes}", hint="expected 0 or more; staging: off needs none")
    if not config.background and config.mode != "pull":
        raise ConfigError(f"background: false with mode {config.mode!r}", hint="only pull can post in the engine loop")
    if not config.background and config.pull_by == "write":
        raise ConfigError(
            "pull_by: 'write' with background false",
            hint="the engine loop posts READs: set pull_by to 'auto' or 'read', or background to true",
        )
    for peer in config.peers:
        parse_address(peer, "peers")
    return config


def parse_address(text: str, field: str) -> tuple[str, int]:
    """'host:port' or '[v6]:port' -> (host, port). Raises `ConfigError`."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"{field}: {text!r}", hint="expected host:port, for example 127.0.0.1:5600")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ConfigError(f"{field}: {text!r}", hint=f"write an IPv6 address in brackets: [{host}]:{port}")
    return host.strip("[]"), int(port)
