"""Everything that travels on the side channel between two engines, and between the router and an engine.

Each message is one frozen, tagged struct. A decode rank dials a prefill rank, so `Hello`, `Register`, `Cancel` and
`Fetched` go from decode to prefill; `Welcome`, `Begin`, `Grant`, `Landed` and `Failed` come back on that connection.
Times on the wire are durations in seconds, never points in time, but for `Inspection.wall_s`, which decides nothing.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from kvferry.ids import EngineId, LifeId, RegistrationId, TransferId

Mode = Literal["push", "pull", "stream"]
PullBy = Literal["auto", "read", "write"]
"""Who moves the bytes in mode pull: decode by READs, prefill by WRITEs, or as the path allows."""
Verify = Literal["off", "sample", "full"]
"""How much of the KV is looked at on both sides (`digest.py`), ascending."""
MOST_REASON = 4096  # characters; it is remembered
Natural = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=1 << 32)]
Ranks = Annotated[int, msgspec.Meta(ge=1, le=4096)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
Transfer = Annotated[TransferId, msgspec.Meta(max_length=512)]
Echo = Annotated[bytes, msgspec.Meta(max_length=64)]
ProbeBytes = Annotated[int, msgspec.Meta(ge=1, le=1 << 28)]
ProbeSizes = Annotated[tuple[ProbeBytes, ...], msgspec.Meta(min_length=1, max_length=64)]
Device = Annotated[str, msgspec.Meta(pattern=r"^(cpu|cuda:\d+)$")]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, kw_only=True):
    """Base of all messages; the tag on the wire is the class name."""


class Plane(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One strided array of blocks: the KV (or only K, or only V) of one layer.

    Block b, head h, token t begins at `base + b*block_stride + h*head_stride + t*token_bytes`; one head of one block
    is `block_size*token_bytes` contiguous bytes. All in bytes.
    """

    base: Natural
    block_stride: Natural
    head_stride: Natural
    token_bytes: Natural


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The paged KV memory of one rank.

    `heads`: KV heads stored on this rank. `total_heads`: KV heads of the model. `divisible`: whether the tokens of one
    head of one block lie one after the other, so that a part of a block can be addressed; where False (CPU kernels
    pack tokens), both sides need the same block size. `fingerprint`: whatever else must be equal, by name.
    """

    planes: Annotated[tuple[Plane, ...], msgspec.Meta(min_length=1)]
    num_blocks: Positive
    block_size: Positive
    heads: Positive
    total_heads: Positive
    divisible: bool
    device: Device
    fingerprint: dict[str, str]


class Greeting(Message, frozen=True):
    """Who speaks, how its KV lies, and what reaches its fabric. `scratch`: address of memory that the other side may
    read and write to make the fabric connect. `silence_s`: how long it may hear nothing before it cuts the line.
    `pull_by`: how it wants to pull, or be pulled from."""

    life: LifeId
    engine_id: EngineId
    rank: Natural
    tp_size: Ranks
    layout: Layout
    agent: bytes
    scratch: Natural
    silence_s: Seconds
    pull_by: PullBy


class Hello(Greeting, frozen=True):
    """D -> P, first on a connection. `dialled`: P's address as D spells it; a second spelling is a second connection,
    the same one again means that the connection before it is dead, whether or not P has noticed."""

    dialled: str


class Welcome(Greeting, frozen=True):
    """P -> D, answer to `Hello`: P has added D's agent."""


class Warm(Message, frozen=True):
    """Either way: my first access to your memory went through; you need not drive your agent for me any more.

    `echo`, D -> P: what came to D's agent with P's first access, so that agent and memory are D's own."""

    echo: Echo = b""


class Look(Message, frozen=True):
    """P -> D: read my scratch memory, while I keep my hands off my agent."""


class Looked(Message, frozen=True):
    """D -> P, answer to `Look`: its READ went through (`alone`). Or it has not in time, so that P must drive its agent
    for it until the same comes again, `over`."""

    alone: bool
    over: bool


class Refuse(Message, frozen=True):
    """P -> D, answer to `Hello`: these two engines cannot exchange KV."""

    code: str
    reason: str


class Beat(Message, frozen=True):
    """Either way: I am alive. Sent when nothing else was, at a third of the other side's `silence_s`."""


class Register(Message, frozen=True):
    """D -> P: a destination for one transfer.

    D wants tokens [start_token, end_token) and has for them the blocks `block_ids`, the first of which holds logical
    block `start_token // block_size` (D's block size). `legs`: how many registrations this P rank will see for the
    transfer in all. `start_token == end_token`: D needs nothing; P is only told that it may let go. `prompt`: digest of
    the first `end_token` token ids, '' where D doesn't know (`prompt.py`). `verify`: how much D would check. `credit`:
    how many streamed WRITEs D takes at once from this P rank, as of now.
    """

    reg_id: RegistrationId
    transfer_id: Transfer
    mode: Mode
    start_token: Natural
    end_token: Natural
    block_ids: tuple[Natural, ...]
    legs: Ranks
    credit: Positive
    prompt: str = ""
    verify: Verify = "off"


class Waiting(Message, frozen=True):
    """D -> P: a request of mine queues for blocks and will register for this transfer: be patient."""

    transfer_id: Transfer


class Cancel(Message, frozen=True):
    """D -> P: D no longer wants this; P answers `Failed` (or `Landed`, if that crossed) when no write can come."""

    reg_id: RegistrationId
    reason: str


class Fetched(Message, frozen=True):
    """D -> P, pull by READ: D's READs have ended, well or not; P's blocks are not read any more."""

    reg_id: RegistrationId
    ok: bool


class Begin(Message, frozen=True):
    """P -> D, where P writes: WRITEs are being posted from now on. `sealed`: prefill is done, no `Seal` follows."""

    reg_id: RegistrationId
    sealed: bool


class Seal(Message, frozen=True):
    """P -> D, stream: prefill is done, the tokens up to `end_token` are all that will come. `attempt`: how many times
    prefill began anew, and with it the writing."""

    reg_id: RegistrationId
    end_token: Natural
    attempt: Natural


class Grant(Message, frozen=True):
    """P -> D, pull by READ: read what you registered for from these blocks of mine, logical block 0 first. They stay
    until `Fetched`, to which P answers `Landed` if they did stay, or `Failed`."""

    reg_id: RegistrationId
    block_ids: tuple[Natural, ...]


class Landed(Message, frozen=True):
    """P -> D: every WRITE of this registration has completed, or the READs counted (pull by READ). `nbytes`: all
    that was written; D knows what it must be. `digests`: of what P computed, 8 bytes each, as deep as `verify` says:
    the weaker of what both sides want."""

    reg_id: RegistrationId
    nbytes: Natural
    descriptors: Natural
    verify: Verify = "off"
    digests: bytes = b""


class Failed(Message, frozen=True):
    """P -> D: this registration ended without its KV, and no write to its blocks can come any more. Not `final`: P
    gives the whole connection up, and what it had on the way may still arrive until it has welcomed D anew."""

    reg_id: RegistrationId
    code: str
    reason: str
    final: bool = True


class StageStep(Message, frozen=True):
    """Base of what is said about one staged span (`protocol/staging.py`); P chooses the number, for its connection."""

    stage_id: Natural


class StageAsk(StageStep, frozen=True):
    """P -> D: lend me `slots` slots of your staging area for this part of the registration. As many whole pieces as
    `slot_bytes` hold go into one."""

    reg_id: RegistrationId
    start_token: Natural
    end_token: Natural
    first_plane: Natural
    end_plane: Natural | None
    slots: Positive
    slot_bytes: Positive


class StageLent(StageStep, frozen=True):
    """D -> P, answer to `StageAsk`: where they begin; none if D has not so many, or shorter ones."""

    slots: tuple[Natural, ...]


class Staged(StageStep, frozen=True):
    """P -> D: pieces [first, first + count) of the span are in your slot `slot`, counted from 0."""

    slot: Natural
    first: Natural
    count: Positive


class Unstaged(StageStep, frozen=True):
    """D -> P: they lie in my blocks, and the slot can be written again."""

    slot: Natural


class Describe(Message, frozen=True):
    """Router -> any rank."""


class Description(Message, frozen=True):
    """Answer to `Describe`. Of now, and of this rank: `open_transfers` in either direction, and `backlog_bytes` of
    streamed KV that are computed and registered for, but not posted."""

    engine_id: EngineId
    life: LifeId
    rank: Natural
    tp_size: Ranks
    role: str
    mode: Mode
    block_size: int
    version: str
    open_transfers: Natural = 0
    backlog_bytes: Natural = 0
    pull_by: PullBy = "auto"


class Abandon(Message, frozen=True):
    """Router -> any rank: this transfer has no taker any more (or its request is gone); free what it holds. On D its
    request fails."""

    transfer_id: Transfer
    reason: Annotated[str, msgspec.Meta(max_length=MOST_REASON)]


class Watch(Message, frozen=True):
    """Router -> P: tell me when `percent` of this transfer's prompt are computed. It need not have come yet."""

    transfer_id: Transfer
    percent: Annotated[int, msgspec.Meta(ge=0, le=100)]


class Reached(Message, frozen=True):
    """Answer to `Watch`, once. `of`: the prompt's tokens. `ended`: the transfer is over, `tokens` may be fewer."""

    transfer_id: Transfer
    tokens: Natural
    of: Natural
    ended: bool


class Abandoned(Message, frozen=True):
    """Answer to `Abandon`. `known`: whether that rank held anything for it."""

    transfer_id: Transfer
    known: bool


class Why(Message, frozen=True):
    """Router -> any rank: how did this transfer end here?"""

    transfer_id: Transfer


class Verdict(Message, frozen=True):
    """Answer to `Why`. `state`: 'open', 'ok', 'failed' or 'unknown'; `code` is one of `errors.py`."""

    transfer_id: Transfer
    state: str
    code: str
    reason: str


class Inspect(Message, frozen=True):
    """Doctor -> any rank."""


class Inspection(Message, frozen=True):
    """Answer to `Inspect`: what must be known to judge from outside whether two ranks fit.

    `background`: False where transfers are posted in the engine loop. `versions`: of kvferry, Python
    and what is installed of vllm, torch, nixl. `wall_s`: the machine's clock, seconds since 1970, to be compared with
    others by people.
    """

    engine_id: EngineId
    life: LifeId
    rank: Natural
    tp_size: Ranks
    role: str
    mode: Mode
    background: bool
    layout: Layout
    backends: tuple[str, ...]
    versions: dict[str, str]
    machine: str
    wall_s: float


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One measured transfer: D's GET or P's PUT of `nbytes`, in one piece or in many that aren't adjacent. Seconds from
    before the post to completion: the median and the fastest of `repeats`."""

    op: Literal["GET", "PUT"]
    scattered: bool
    nbytes: Positive
    median_s: Seconds
    fastest_s: Seconds
    repeats: Positive


class Route(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the fabric says it uses for one operation from `least` to `most` bytes (None: no limit)."""

    op: Literal["GET", "PUT"]
    least: Natural
    most: int | None
    how: str
    via: str


class Half(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one side of a probe found out. `routes` is empty where the fabric doesn't tell; `untold` says why.
    `rdma_devices`: as the kernel lists them. `efa`: what `fi_info -p efa` said in a word or two."""

    machine: str
    device: Device
    routes: tuple[Route, ...]
    untold: str
    ucx_version: str
    rdma_devices: tuple[str, ...]
    efa: str


class Probe(Message, frozen=True):
    """Doctor -> D rank: measure the way between you and the P rank at `host:port`. `sizes`: bytes per transfer,
    ascending; `piece`: bytes of one piece of a scattered one. It ends within `limit_s`."""

    host: str
    port: Positive
    sizes: ProbeSizes
    piece: ProbeBytes
    limit_s: Seconds


class Probed(Message, frozen=True):
    """Answer to `Probe`: `failure` is empty, and the GETs of D and the PUTs of P are there, or it says why not."""

    failure: str
    points: tuple[Point, ...] = ()
    decode: Half | None = None
    prefill: Half | None = None


class Reach(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Memory of one half of a probe: the agent that owns it and where it begins."""

    agent: bytes
    base: Natural
    device: Device


class ProbeStep(Message, frozen=True):
    """Base of what the two halves of a probe say to each other. Both speak to P's rank, which hands it on."""

    probe_id: str


class ProbeTarget(ProbeStep, frozen=True):
    """D's half -> P rank: start your half, and tell it this. `sizes`, `piece`, `limit_s`: as in `Probe`."""

    reach: Reach
    sizes: ProbeSizes
    piece: ProbeBytes
    limit_s: Seconds


class ProbeReady(ProbeStep, frozen=True):
    """P's half -> D's half: my memory is there, and I drive my agent."""

    reach: Reach


class ProbeNext(ProbeStep, frozen=True):
    """D's half -> P's half: my GETs are done, begin your PUTs; the second time: I have your times, you may go."""


class ProbeTimes(ProbeStep, frozen=True):
    """P's half -> D's half: my PUTs are done."""

    points: tuple[Point, ...]
    half: Half


class ProbeFailed(ProbeStep, frozen=True):
    """Either half, or P's rank: the probe is over."""

    reason: str


AnyMessage = (
    Hello
    | Welcome
    | Warm
    | Look
    | Looked
    | Refuse
    | Beat
    | Register
    | Waiting
    | Cancel
    | Fetched
    | Begin
    | Seal
    | Grant
    | Landed
    | Failed
    | StageAsk
    | StageLent
    | Staged
    | Unstaged
    | Describe
    | Description
    | Abandon
    | Abandoned
    | Watch
    | Reached
    | Why
    | Verdict
    | Inspect
    | Inspection
    | Probe
    | Probed
    | ProbeTarget
    | ProbeReady
    | ProbeNext
    | ProbeTimes
    | ProbeFailed
)
