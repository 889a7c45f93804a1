"""`kvferry engine`: arguments, start, clean end. Settings bear vLLM's names; their defaults come from the profile."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import re
import signal
import socket
import sys
import uuid
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from kvferry.engine.config import EngineConfig
from kvferry.engine.loop import EngineLoop
from kvferry.engine.profile import Profile, load, shipped
from kvferry.engine.server import Server, ServerConfig
from kvferry.engine.text import BUILTIN, Tokenizer, open_tokenizer
from kvferry.errors import ConfigError, KVFerryError, unknown_name
from kvferry.listener import bind, not_listening, runner, url_of

DRAIN_S = 0.5
"""A stop waits this long for running requests, then cancels them."""
BACKLOG = 2048
SWITCH_S = 0.001
"""Longest wait of the event loop for the interpreter while the engine thread computes; each write gives it up."""


CONNECTOR = "KVFerryConnector"
ROLES = ("kv_producer", "kv_consumer", "kv_both")
LOAD_FAILURE_POLICIES = ("fail", "recompute")
TRANSFER_SETTINGS = {
    *("kv_connector", "kv_connector_module_path", "kv_role", "engine_id", "kv_connector_extra_config"),
    *("kv_buffer_device", "kv_buffer_size", "kv_rank", "kv_parallel_size", "kv_ip", "kv_port"),
    *("enable_permute_local_kv", "kv_load_failure_policy"),
}
"""vLLM's; those that this engine has no use for are accepted."""


class EngineDied(KVFerryError):
    code = "engine_died"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=8000, help="0 takes a free one (default: %(default)s)")
    add(
        "--profile",
        default="instant",
        metavar="NAME|FILE",
        help=f"model and timing: {', '.join(sorted(shipped()))}, or a file",
    )
    add("--served-model-name", nargs="+", metavar="NAME", help="what clients call the model (default: --model)")
    add("--model", metavar="NAME", help="a name to serve under (default: the profile's); nothing is loaded from there")
    add("--tokenizer", default=BUILTIN, metavar="NAME|DIR", help="builtin, smollm2, or a folder with tokenizer.json")
    add("--tensor-parallel-size", "--tp", "-tp", type=int, default=1, metavar="N", help="ranks (default: %(default)s)")
    add("--block-size", type=int, metavar="N", help="tokens per KV block")
    add("--num-gpu-blocks-override", type=int, metavar="N", help="KV blocks")
    add("--max-model-len", type=int, metavar="N", help="tokens of prompt and output together")
    add("--max-num-seqs", type=int, metavar="N", help="requests in one step")
    add("--max-num-batched-tokens", type=int, metavar="N", help="tokens in one step")
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True, help="(default: on)")
    add("--kv-transfer-config", metavar="JSON", help="as vLLM has it; engines without it take no part in transfers")
    add("--byte-scale", type=int, default=1, metavar="N", help="keep 1/N of the KV's bytes, in as many pieces")
    add("--fragmentation", type=float, default=0.0, metavar="F", help="0: blocks in a row, 1: scattered")
    add("--device", default="cpu", metavar="cpu|cuda[:N]", help="where the KV memory is (default: %(default)s)")
    add("--api-key", nargs="+", default=[], metavar="K", help="clients must send one of these")
    add("--enable-faults", action="store_true", help="serve POST /fault, which breaks things on purpose")
    add(
        "--debug-invariants",
        action="store_true",
        help="end with an error if anything is left behind when nothing runs; the connector's setting of this name too",
    )
    add("--dtype", default="auto", help="accepted as vLLM's; the profile says how wide the KV is")


def configs_of(args: argparse.Namespace, profile: Profile, tokenizer: Tokenizer) -> tuple[EngineConfig, ServerConfig]:
    """Raises `ConfigError`."""
    if not 0 <= args.port <= 65535:
        raise ConfigError(f"port: {args.port} is not a port", hint="expected 0 to 65535")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", args.device):
        raise ConfigError(f"device: unknown {args.device!r}", hint="expected cpu, cuda or cuda:N")
    limits = profile.limits
    names = tuple(args.served_model_name or [args.model or profile.name])

    def either(given: int | None, default: int) -> int:
        return default if given is None else given

    engine = EngineConfig(
        profile=profile,
        served_model_name=names[0],
        tp=args.tensor_parallel_size,
        kv_transfer=_transfer_config(args.kv_transfer_config, args.debug_invariants),
        num_blocks=either(args.num_gpu_blocks_override, limits.num_blocks),
        block_size=either(args.block_size, limits.block_size),
        max_model_len=either(args.max_model_len, limits.max_model_len),
        max_num_seqs=either(args.max_num_seqs, limits.max_num_seqs),
        max_num_batched_tokens=either(args.max_num_batched_tokens, limits.max_num_batched_tokens),
        enable_prefix_caching=args.enable_prefix_caching,
        byte_scale=args.byte_scale,
        fragmentation=args.fragmentation,
        device="cuda:0" if args.device == "cuda" else args.device,
        vocab_size=min(tokenizer.vocab_size, limits.vocab_size),
        debug_invariants=args.debug_invariants,
    )
    engine.check()
    server = ServerConfig(
        names=names,
        max_model_len=engine.max_model_len,
        vocab_size=max(tokenizer.vocab_size, engine.vocab_size),
        api_keys=tuple(args.api_key),
        faults=args.enable_faults,
        transfers=engine.kv_transfer is not None,
        cache={
            "block_size": engine.block_size,
            "enable_prefix_caching": engine.enable_prefix_caching,
            "num_gpu_blocks": engine.num_blocks,
        },
    )
    return engine, server


def _transfer_config(text: str | None, debug: bool) -> Mapping[str, Any] | None:
    if text is None:
        return None
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"kv_transfer_config: {text!r} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"kv_transfer_config: expected a JSON object, got {text!r}")
    for name in config.keys() - TRANSFER_SETTINGS:
        raise unknown_name("kv_transfer_config", name, TRANSFER_SETTINGS)
    if config.get("kv_connector", CONNECTOR) != CONNECTOR:
        raise ConfigError(f"kv_connector: {config['kv_connector']!r} is not served here", hint=f"expected {CONNECTOR}")
    if config.get("kv_role") not in ROLES:
        raise ConfigError(f"kv_role: {config.get('kv_role')!r}", hint=f"expected one of {', '.join(ROLES)}")
    policy = config.get("kv_load_failure_policy", "fail")
    if policy not in LOAD_FAILURE_POLICIES:
        hint = f"expected one of {', '.join(LOAD_FAILURE_POLICIES)}"
        raise ConfigError(f"kv_load_failure_policy: {policy!r}", hint=hint)
    if debug:
        config["kv_connector_extra_config"] = {
            **(config.get("kv_connector_extra_config") or {}),
            "debug_invariants": True,
        }
    return {"engine_id": uuid.uuid4().hex} | config


async def serve(engine: EngineConfig, config: ServerConfig, tokenizer: Tokenizer, listener: socket.socket) -> None:
    """Until a signal asks it to stop. Raises `KVFerryError` if it cannot start, `EngineDied` if its thread ended."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server = Server(config, tokenizer)
    loop = EngineLoop(engine, server.deliver, server.moved)
    server.engine = loop
    await asyncio.to_thread(loop.start)
    try:
        await _listen_until(stop, server, listener)
    finally:
        await asyncio.to_thread(loop.close)
    if loop.death is not None:
        raise EngineDied(f"the engine thread died: {type(loop.death).__name__}: {loop.death}") from loop.death


async def _listen_until(stop: asyncio.Event, server: Server, listener: socket.socket) -> None:
    served = runner(server.app(), DRAIN_S)
    await served.setup()
    watch, stopped = asyncio.create_task(server.watch()), asyncio.create_task(stop.wait())
    try:
        try:
            await web.SockSite(served, listener, backlog=BACKLOG).start()
        except OSError as error:
            host, port = listener.getsockname()[:2]
            raise not_listening(host, port, error) from None
        print(f"listening {url_of(listener)}", flush=True)
        await asyncio.wait({watch, stopped}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await served.cleanup()
        for task in (watch, stopped):
            task.cancel()
        await asyncio.gather(watch, stopped, return_exceptions=True)


def run(args: argparse.Namespace) -> int:
    """Raises `KVFerryError`: the caller prints it in one line and exits 1."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    profile = load(args.profile)
    tokenizer = open_tokenizer(args.tokenizer, profile.limits.vocab_size)
    engine, config = configs_of(args, profile, tokenizer)
    sys.setswitchinterval(SWITCH_S)
    with bind(args.host, args.port) as listener:
        asyncio.run(serve(engine, config, tokenizer, listener))
    return 0
