"""What the router is told once at start: frozen and strict. Each default has its reason and unit here."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvferry.auth import is_loopback
from kvferry.errors import ConfigError
from kvferry.router.bounds import check_bounds
from kvferry.router.choice.disaggregate import Setting
from kvferry.router.choice.policy import Policy
from kvferry.router.engines.breaker import BreakerSettings
from kvferry.router.engines.budget import RetrySettings
from kvferry.router.engines.outliers import OutlierSettings
from kvferry.router.spec import EngineSpec

Connector = Literal["kvferry", "upstream-pull", "upstream-push", "none"]
Mode = Literal["push", "pull", "stream", "colocated"]
Action = Literal["queue", "shed", "colocate"]
FirstToken = Literal["prefill", "decode"]
MIB = 1024 * 1024


IMPLIED: dict[Connector, Mode] = {"upstream-pull": "pull", "upstream-push": "push", "none": "colocated"}
"""The one mode of each connector but ours."""


def mode_of(connector: Connector, given: Mode | None) -> Mode:
    """Raises `ConfigError` for a mode that the connector doesn't have."""
    implied = IMPLIED.get(connector)
    if implied is None:
        return given or "push"
    if given is not None and given != implied:
        raise ConfigError(
            f"--mode: {given!r} with connector {connector}, which is always {implied}",
            hint="drop --mode, or use --connector kvferry",
        )
    return implied


def bind_percent(bind: str) -> int:
    """How much of a prompt is computed when its decode engine is chosen; 0: 'early', 100: 'late'.

    Raises `ConfigError`.
    """
    named = {"early": 0, "late": 100}
    if bind in named:
        return named[bind]
    kind, _, percent = bind.partition("=")
    if kind != "at" or not percent.isdecimal() or not 0 <= int(percent) <= 100:
        raise ConfigError(f"--bind: {bind!r}", hint="expected early, late or at=PERCENT, for example at=50")
    return int(percent)


def check_bind(bind: str, where: str, streams: bool) -> None:
    """Raises `ConfigError` if that can't be. `where`: the mode or connector, in words; `streams`: it is `stream`."""
    if bind_percent(bind) and not streams:
        raise ConfigError(f"--bind: {bind!r} with {where}", hint="only --mode stream can bind later than early")


def check_first_token(config: RouterConfig) -> None:
    """Raises `ConfigError` where D has its request before P has a token."""
    pulls = config.connector == "kvferry" and config.mode == "pull"
    if config.first_token == "prefill" and not pulls and not (config.streams and config.bind_percent):
        ours = config.connector == "kvferry"
        where = f"connector {config.connector}" if not ours else f"mode {config.mode}"
        if ours and config.streams:
            where += f" and --bind {config.bind}"
        raise ConfigError(
            f"--first-token: 'prefill' with {where}",
            hint="decode must be asked after prefill: --mode pull, or --mode stream --bind late, of connector kvferry",
        )


def check_guarding(config: RouterConfig) -> None:
    """Raises `ConfigError` for what would be less guarded than it looks."""
    if config.ssl_keyfile and not config.ssl_certfile:
        raise ConfigError("--ssl-keyfile without --ssl-certfile", hint="give both, or neither for plain HTTP")
    if config.ssl_ca_certs and not config.ssl_certfile:
        raise ConfigError("--ssl-ca-certs without --ssl-certfile", hint="clients show certificates over TLS only")
    if config.admin_key_file and config.admin_port is None:
        raise ConfigError("--admin-key-file without --admin-port", hint="--admin-port PORT, or 0 for a free one")
    if config.admin_port is not None and not config.admin_key_file and not is_loopback(config.admin_host):
        raise ConfigError(
            f"--admin-host: {config.admin_host!r} can be reached from other machines, and there is no key",
            hint="set --admin-key-file, or leave --admin-host at 127.0.0.1",
        )


class RouterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`mode` is a choice for connector `kvferry` only; the others imply theirs (`none`: colocated)."""

    decode: tuple[EngineSpec, ...]
    prefill: tuple[EngineSpec, ...] = ()
    connector: Connector = "kvferry"
    mode: Mode = "push"
    bind: str = "early"
    """When a decode engine is chosen in mode `stream`: 'early', with the prefill engine; 'late', when prefill is done;
    'at=PERCENT', when so much of the prompt is computed. KV that was computed before is written then."""
    first_token: FirstToken = "decode"
    """Who makes the first token of an answer. 'prefill': it goes out one transfer earlier where that changes nothing,
    and from then on a failure of D is the client's; see `first_token.py`."""
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str = ""
    """Sent upstream where the client sent no Authorization of its own, and with probes; "" = none."""
    auth_key_file: str = ""
    """Of connector `kvferry`: the key of the engines' side channels; see `kvferry.auth.load_key`."""
    story_dir: str = ""
    request_timeout_s: float = 0.0
    """The whole of a request, first byte in to last byte out; 0 = no limit (a long answer is no fault)."""
    max_body_bytes: int = 64 * MIB
    """A 1M-token prompt with images is tens of MB; more is a mistake."""
    max_requests: int = 4096
    """In flight at once; more get 429. Each takes three descriptors (client, P, D)."""
    probe_interval_s: float = 1.0
    """An engine that went away gets no new request after this long."""
    describe_interval_s: float = 5.0
    """Side channel and model list are asked this often while an engine is well: they change only with a restart."""
    connect_timeout_s: float = 5.0
    hold_s: float = 0.25
    """How long a failure of D waits for P's, which says more; and a refusal of P's for D's, which got the client's own
    body and says it more exactly. D's first token waits for nothing: it exists only because
    P's KV has landed, or because D needed none of it."""
    allow_local_prefill: bool = False
    """With no prefill engine ready, let D compute the prompt itself (counted, and warned about)."""
    ssl_certfile: str = ""
    """"" = plain HTTP. The three have vLLM's names; see `tls.py`."""
    ssl_keyfile: str = ""
    ssl_ca_certs: str = ""
    engine_ca_certs: str = ""
    client_key_file: str = ""
    """Clients must send one of its keys; see `keys.py`."""
    admin_host: str = "127.0.0.1"
    admin_port: int | None = None
    """Dashboard and operations; None = off, 0 = a free one."""
    admin_key_file: str = ""
    log_format: Literal["text", "json"] = "text"
    log_level: Literal["debug", "info", "warning", "error", "critical"] = "info"
    """At info there is a line for each request; at warning, for each that failed."""
    otlp_traces_endpoint: str = ""
    """Of an OpenTelemetry collector; "" = no spans."""
    retries: int = 2
    """Further tries of a request of which the client has no byte yet. One outlives an engine that died; the second, one
    more that went with it or was chosen before a probe saw it. More would only make an outage longer."""
    retry: RetrySettings = RetrySettings()
    breaker: BreakerSettings = BreakerSettings()
    outliers: OutlierSettings = OutlierSettings()
    drain_timeout_s: float = 300.0
    """An engine that is to go is waited for this long, where the request to remove it doesn't say; a long answer takes
    minutes. What still runs there then runs on, but nobody waits for it."""
    discover: tuple[str, ...] = ()
    """Sources of engines besides `prefill` and `decode`: `[ROLE=]KIND:WHERE[,NAME=VALUE]...`, see `discovery.py`."""
    prefill_policy: Policy = "prefix_aware"
    """Fewest tokens to compute; `bench/policies.sh` compares it with the others."""
    decode_policy: Policy = "least_loaded"
    disaggregate: Setting = "always"
    """Below so many uncached tokens, or where that is cheaper by what was seen ('auto'), D computes a prompt itself.
    Not by default: D's prefix cache is the router's guess unless its KV events say."""
    ttft_slo_ms: float = 0.0
    """Objective for the first token; 0 = none, every request is let in at once."""
    slo_action: Action = "queue"
    """For a request that can't meet it: wait in the router, 429, or prefill on D."""
    slo_queue: int = 256
    """Requests that wait at once; one more gets 429."""
    slo_queue_s: float = 30.0
    """One waits no longer: a client that has waited so long has mostly left."""
    session_ttl_s: float = 7200.0
    """A session that nobody used for so long is forgotten, and with it the engines that it was sent to."""
    render: tuple[str, ...] = ()
    """Addresses of render workers; () = engines render. See `render/`."""
    render_fallback: Literal["error", "engines"] = "error"
    """Where no worker can be used: 503, or engines render as if there were no tier."""
    render_timeout_s: float = 30.0
    """For one answer of a worker: rendering a prompt of a million tokens takes seconds, turning tokens into text
    milliseconds. A worker that takes longer is lost."""
    prefix_tokens: int = 0
    """What one engine's prefix cache is taken to hold; 0 = as its metrics tell, else 400,000."""

    @property
    def colocated(self) -> bool:
        return self.connector == "none" or self.mode == "colocated"

    @property
    def streams(self) -> bool:
        return self.connector == "kvferry" and self.mode == "stream"

    @property
    def watches_prefixes(self) -> bool:
        """Keys of prompts cost some microseconds each: they are made where something looks at them. Every load does:
        what an engine has cached it need not compute."""
        by_load = {self.prefill_policy, self.decode_policy} - {"round_robin", "random"}
        return bool(by_load) or self.disaggregate != "always" or self.ttft_slo_ms > 0

    @property
    def shows_dashboard(self) -> bool:
        """On the port of the clients: only where that is this machine alone, and nothing says otherwise."""
        return self.admin_port is None and not self.client_key_file and is_loopback(self.host)

    @property
    def bind_percent(self) -> int:
        """See the function of this name."""
        return bind_percent(self.bind)

    def check_prefill(self, spec: EngineSpec) -> None:
        """Raises `ConfigError` for a prefill engine that this connector can't use as it is told."""
        if self.connector == "upstream-push" and not spec.engine_id:
            raise ConfigError(
                f"prefill engine {spec.url}: connector upstream-push needs its engine id",
                hint='start it with "engine_id" in --kv-transfer-config and add ,engine_id=ID to --prefill',
            )

    def check(self) -> None:
        """Raises `ConfigError` for settings that contradict each other."""
        ours = self.connector == "kvferry"
        check_bounds(self)
        check_guarding(self)
        check_bind(self.bind, f"mode {self.mode!r}" if ours else f"connector {self.connector!r}", self.streams)
        check_first_token(self)
        for settings in (self.retry, self.breaker, self.outliers):
            settings.check()
        if not self.decode and not self.discover:
            raise ConfigError("no decode engine", hint="--decode URL, or --discover SOURCE")
        if self.colocated and (self.disaggregate != "always" or self.ttft_slo_ms):
            option = "--ttft-slo" if self.ttft_slo_ms else "--disaggregate"
            raise ConfigError(f"{option} with colocated serving", hint="it is about prefill engines, and there is none")
        if not self.colocated and not self.prefill and not self.discover:
            raise ConfigError("no prefill engine", hint="--prefill URL, --discover SOURCE, or --mode colocated")
        if self.colocated and self.prefill:
            raise ConfigError("colocated serving takes no prefill engine", hint="drop --prefill, or --mode push")
        for spec in self.prefill:
            self.check_prefill(spec)
        urls = [spec.url for spec in (*self.prefill, *self.decode)] + list(self.render)
        for url in urls:
            if urls.count(url) > 1:
                what = "render worker" if url in self.render else "engine"
                raise ConfigError(f"{what} {url} is named twice")
        if self.render_fallback != "error" and not self.render:
            hint = "--render URL, or drop --render-fallback"
            raise ConfigError(f"--render-fallback {self.render_fallback} without --render", hint=hint)
