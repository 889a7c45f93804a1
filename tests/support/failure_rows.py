"""What breaks, one function per row of the failure matrix; see `failure_matrix.py` for what must come of it."""

from __future__ import annotations

from collections.abc import Callable

from failure_scene import STEP_S, Scene

from kvferry.errors import FabricError
from kvferry.protocol import messages as wire
from kvferry.transfer import commands as cmd

FROZEN_S = 16.0  # longer than every limit but that of prefill
HEARD_AGAIN_S = 20.0  # a whole number of connect time-outs
CUT_S = 3.0  # longer than D settles
LATE_S = 32.0  # than which nobody waits longer for a prefill
READS_LATE_S = 8.0
COMES_LATE_S = 12.0
HOUR_S = 3600.0


def p_dies(scene: Scene) -> None:
    scene.p_goes_on = False
    scene.die(scene.p)


def d_dies(scene: Scene) -> None:
    scene.d_comes = False
    scene.die(scene.d)


def router_dies(scene: Scene) -> None:
    """Both engines see their client's connection close; a leg that was not sent yet never comes."""
    scene.d_comes = False
    abort_on_p(scene)
    scene.d.core.submit(cmd.Drop("d-t"))


def client_leaves(scene: Scene) -> None:
    """The router closes both legs, and tells P to let go of what D may not have fetched."""
    router_dies(scene)
    if scene.stage != "decoding":
        scene.abandon("the client left")


def abort_on_p(scene: Scene) -> None:
    if scene.p_handed:
        return  # it has ended there: the engine's abort finds nothing
    scene.p_goes_on = False
    held = scene.mode == "stream" and scene.stage in ("met", "flying")
    scene.p.core.submit(cmd.Abort("t", "p-t", "aborted on the prefill engine", held))


def abort_on_d(scene: Scene) -> None:
    scene.d_comes = False
    scene.d.core.submit(cmd.Drop("d-t"))


def preempt_on_p(scene: Scene) -> None:
    if scene.mode == "stream" and scene.stage in ("met", "flying"):
        scene.p_goes_on = False  # until `Rewound`
        scene.p.core.submit(cmd.Rewind("t", "p-t"))
    elif scene.p_handed:
        scene.p.core.submit(cmd.Abort("t", "p-t", "preempted after its KV was handed over"))


def p_restarts(scene: Scene) -> None:
    scene.p_goes_on = False
    scene.die(scene.p, scene.start_p)


def d_restarts(scene: Scene) -> None:
    scene.d_comes = False
    scene.die(scene.d, scene.start_d)


def handshake_fails(scene: Scene) -> None:
    """The connection breaks, and P does not answer the next greeting."""
    scene.network.filter = lambda data: [] if scene.says(data, wire.Hello) else [data]
    scene.cut()
    scene.after(HEARD_AGAIN_S, scene.all_is_heard)


def connection_breaks(scene: Scene) -> None:
    scene.paused = True
    for copy in scene.world.copies:
        copy.held = True
    scene.world.hold = scene.stage in ("met", "flying")
    scene.cut()
    scene.network.hold = False
    if scene.world.hold:
        scene.after(CUT_S, scene.release)


def registration_lost(scene: Scene) -> None:
    scene.next_news(lambda message, data: [], (wire.Register,))


def registration_twice(scene: Scene) -> None:
    if not scene.d_landed:
        scene.next_news(lambda message, data: [data, data], (wire.Register,))
    else:
        scene.say_again_registration()


def news_lost(scene: Scene) -> None:
    scene.next_news(lambda message, data: [])


def news_late(scene: Scene) -> None:
    """By more than every limit that runs."""

    def keep(message: wire.AnyMessage, data: bytes) -> list[bytes]:
        scene.after(30.0, lambda: scene.say_again(message, data))
        return []

    scene.next_news(keep)


def news_twice(scene: Scene) -> None:
    scene.next_news(lambda message, data: [data, data])


def news_swapped(scene: Scene) -> None:
    """The next two that P says change places. As over RDMA: D need not be awake for the bytes to move."""
    scene.d.core._fabric.needs_driving = False

    def keep(message: wire.AnyMessage, data: bytes) -> list[bytes]:
        scene.next_news(lambda later, more: [more, data], scene.P_SAYS)
        return []

    scene.next_news(keep, scene.P_SAYS)


def write_fails(scene: Scene) -> None:
    """READ in pull, where D reads."""
    if scene.world.copies:
        scene.world.copies[0].error = "link flapped"
        return

    def refuse(op: str, owner: str, target: str) -> None:
        scene.world.on_post = lambda op, owner, target: None
        raise FabricError("link flapped")

    scene.world.on_post = refuse


def link_frozen(scene: Scene) -> None:
    scene.paused = scene.network.hold = scene.world.hold = True
    for copy in scene.world.copies:
        copy.held = True
    scene.after(FROZEN_S, scene.release)


def link_slow(scene: Scene) -> None:
    """Every message half a second late, a descriptor each step."""
    scene.paused = scene.network.hold = scene.world.hold = True
    for copy in scene.world.copies:
        copy.held = True

    def crawl() -> None:
        for copy in scene.world.copies:
            copy.move(1)
            copy.held = bool(copy.rows)
        if round(scene.now / STEP_S) % 4 == 0:
            scene.network.deliver()

    scene.every_step = crawl


def p_is_slow(scene: Scene) -> None:
    """Prefill takes, or the bytes take, longer than their limit."""
    scene.p_goes_on = False
    if scene.stage in ("met", "flying"):
        scene.paused = scene.world.hold = True
        for copy in scene.world.copies:
            copy.held = True
        scene.after(FROZEN_S, scene.release)
    scene.after(LATE_S, lambda: None if scene.p_handed else scene.hand_over())


def d_is_slow(scene: Scene) -> None:
    """D comes, or reads, after more than a lease."""
    if not scene.d_landed:
        scene.d_comes = False
        scene.after(COMES_LATE_S, scene.land)
    elif scene.reads and scene.stage in ("met", "flying"):
        scene.paused = scene.world.hold = True
        for copy in scene.world.copies:
            copy.held = True
        scene.after(READS_LATE_S, scene.release)


def pool_of_d_full(scene: Scene) -> None:
    """D's request queues for blocks, and D says so; P is done long before."""
    scene.d_comes = False
    scene.d.core.submit(cmd.Wait("t", "127.0.0.1", 5600))
    scene.after(15.0, scene.land)


def pool_of_p_full(scene: Scene) -> None:
    """P's request queues for blocks."""
    scene.p_goes_on = False
    scene.after(15.0, scene.hand_over)


def clocks_differ(scene: Scene) -> None:
    """They did from the start: see `CONFIG`."""


def many(scene: Scene) -> None:
    scene.bring_others(40)


def engine_stalls(scene: Scene) -> None:
    """What either engine would say next comes 5 s later; it hears nothing meanwhile."""
    scene.later = [(due + 5.0, action) for due, action in scene.later]


STRIKES: dict[str, Callable[[Scene], None]] = {
    "P dies": p_dies,
    "D dies": d_dies,
    "router dies": router_dies,
    "client leaves": client_leaves,
    "request aborted on P": abort_on_p,
    "request aborted on D": abort_on_d,
    "request preempted on P": preempt_on_p,
    "P restarts": p_restarts,
    "D restarts": d_restarts,
    "handshake fails": handshake_fails,
    "connection breaks": connection_breaks,
    "registration lost": registration_lost,
    "registration twice": registration_twice,
    "notification lost": news_lost,
    "notification late": news_late,
    "notification twice": news_twice,
    "notifications out of order": news_swapped,
    "WRITE fails": write_fails,
    "link frozen": link_frozen,
    "link slow": link_slow,
    "lease lapses, P slow": p_is_slow,
    "lease lapses, D slow": d_is_slow,
    "pool of D full": pool_of_d_full,
    "pool of P full": pool_of_p_full,
    "clocks differ by an hour": clocks_differ,
    "more requests than leases": many,
    "engine stalls for 5 s": engine_stalls,
}
CONFIG: dict[str, dict[str, float]] = {"clocks differ by an hour": {"p_ahead": HOUR_S}}
