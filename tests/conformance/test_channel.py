"""What every side channel must do, over memory and over ZMQ."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque

import pytest
import zmq

from kvferry.auth import AuthKey
from kvferry.errors import ConfigError, PeerUnreachable
from kvferry.protocol.codec import MAX_BYTES
from kvferry.transfer.channel import Barred, Down, Got, Uninvited, Up, ZmqChannel
from kvferry.transfer.memory import MemoryNetwork

LIMIT_S = 10.0
KEY = AuthKey("k" * 32, "a test")


class Sides:
    def __init__(self, make, host="127.0.0.1"):
        self.make, self.host = make, host
        self.open = []
        self.seen = {}

    def channel(self, port=0):
        made = self.make(self.host, port)
        self.open.append(made)
        self.seen[made] = deque()
        return made

    def close(self, channel):
        self.open.remove(channel)
        channel.close()
        channel.close()  # idempotent

    def await_(self, channel, kind, data=None):
        """The next event of this kind; what else comes is kept. All others are polled too, as their owners would."""
        until = time.monotonic() + LIMIT_S
        while True:
            for event in self.seen[channel]:
                if isinstance(event, kind) and (data is None or event.data == data):
                    self.seen[channel].remove(event)
                    return event
            assert time.monotonic() < until, f"no {kind.__name__}: {list(self.seen[channel])}"
            for one in self.open:
                self.seen[one].extend(e for e in one.poll(0.005) if not (isinstance(e, Got) and not e.data))


@pytest.fixture(params=["memory", "zmq", "zmq with a key"])
def sides(request):
    fds = len(os.listdir("/proc/self/fd"))
    ports = iter(range(1000, 2000))
    network = MemoryNetwork()
    if request.param == "memory":
        made = Sides(lambda host, port: network.channel(host, port or next(ports)))
    else:
        key = KEY if request.param == "zmq with a key" else None
        made = Sides(lambda host, port: ZmqChannel(host, port, key))
    yield made
    for one in list(made.open):
        made.close(one)
    if request.param != "memory":
        assert len(os.listdir("/proc/self/fd")) <= fds, "descriptors leaked"


def joined(sides):
    p, d = sides.channel(), sides.channel()
    key = d.dial(p.host, p.port)
    assert d.dial(p.host, p.port) == key
    assert sides.await_(d, Up).key == key
    assert d.send(key, b"hello")
    got = sides.await_(p, Got)
    assert got.data == b"hello"
    return p, d, got.key, key


def test_both_ways_in_order(sides):
    p, d, d_key, p_key = joined(sides)
    for i in range(100):
        assert d.send(p_key, b"%d" % i) and p.send(d_key, b"%d!" % i)
    for i in range(100):
        assert sides.await_(p, Got) == Got(d_key, b"%d" % i)
        assert sides.await_(d, Got) == Got(p_key, b"%d!" % i)


def test_unknown_key_is_false(sides):
    p = sides.channel()
    assert p.send("nobody", b"x") is False
    p.hang_up("nobody")


def test_not_connected_yet_is_false(sides):
    d = sides.channel()
    key = d.dial("127.0.0.1", 1)
    assert d.send(key, b"lost") is False


def test_dial_before_listen(sides):
    first = sides.channel()
    port = first.port
    sides.close(first)
    d = sides.channel()
    key = d.dial("127.0.0.1", port)
    d.poll(0.0)
    p = sides.channel(port)
    assert sides.await_(d, Up).key == key
    assert d.send(key, b"now")
    assert sides.await_(p, Got).data == b"now"


def test_restarted_listener_is_found_again(sides):
    p, d, _, key = joined(sides)
    port = p.port
    sides.close(p)
    assert sides.await_(d, Down).key == key
    assert d.send(key, b"lost") is False
    p = sides.channel(port)
    assert sides.await_(d, Up).key == key
    assert d.send(key, b"again")
    assert sides.await_(p, Got).data == b"again"


def test_listener_sees_the_dialler_hang_up_and_come_back(sides):
    p, d, d_key, key = joined(sides)
    d.hang_up(key)
    assert sides.await_(p, Down).key == d_key
    assert d.send(key, b"x") is False and p.send(d_key, b"x") is False
    assert d.dial(p.host, p.port) == key
    assert sides.await_(d, Up).key == key
    d.send(key, b"anew")
    assert sides.await_(p, Got).key != d_key, "a new connection is a new key"


def test_listener_sees_the_dialler_close(sides):
    p, d, d_key, _ = joined(sides)
    sides.close(d)
    assert sides.await_(p, Down).key == d_key


def test_one_diallers_end_leaves_the_other_alone(sides):
    p, d, _, _ = joined(sides)
    e = sides.channel()
    key = e.dial(p.host, p.port)
    sides.await_(e, Up)
    e.send(key, b"e")
    e_key = sides.await_(p, Got, b"e").key
    sides.close(d)
    sides.await_(p, Down)
    assert p.send(e_key, b"still") and sides.await_(e, Got).data == b"still"


def test_port_taken_names_the_port(sides):
    p = sides.channel()
    with pytest.raises(ConfigError, match=f"127.0.0.1:{p.port}.*taken"):
        sides.channel(p.port)


def test_any_bytes_arrive_as_they_are(sides):
    p, d, _, key = joined(sides)
    for data in (b"\0", b"\xff" * 100_000, bytes(range(256))):
        d.send(key, data)
        assert sides.await_(p, Got).data == data


def test_poll_with_nothing_to_tell_returns_nothing(sides):
    assert list(sides.channel().poll(0.0)) == []


@pytest.fixture
def opened():
    """Makes channels, and closes them however the test ends."""
    made = []

    def make(*args):
        made.append(ZmqChannel(*args))
        return made[-1]

    yield make
    for one in made:
        one.close()


def until_seen(channel, kind, *others):
    """The first event of this kind; `others` are polled too."""
    until = time.monotonic() + LIMIT_S
    while True:
        for event in channel.poll(0.02):
            if isinstance(event, kind):
                return event
        for other in others:
            other.poll(0.0)
        assert time.monotonic() < until, f"no {kind.__name__}"


# -- ZMQ only ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def channel():
    made = ZmqChannel("127.0.0.1", 0)
    yield made
    made.close()
    made.wake()  # after the end: nothing


def test_wake_from_another_thread_ends_the_sleep(channel):
    asleep = threading.Event()

    def waker():
        asleep.wait()
        channel.wake()

    thread = threading.Thread(target=waker)
    thread.start()
    started = time.monotonic()
    asleep.set()
    assert list(channel.poll(30.0)) == []
    assert time.monotonic() - started < 10.0
    thread.join()


def test_wake_before_the_poll_is_not_lost(channel):
    channel.wake()
    channel.wake()
    started = time.monotonic()
    channel.poll(30.0)
    assert time.monotonic() - started < 10.0


@pytest.mark.parametrize("key", [None, KEY])
def test_ipv6(opened, key):
    if not socket.has_ipv6:
        pytest.skip("no IPv6 in this Python")
    try:
        listener = opened("::1", 0, key)
    except ConfigError as error:
        pytest.skip(f"no ::1 here: {error}")
    channel = opened("127.0.0.1", 0, key)
    at = channel.dial("::1", listener.port)
    until_seen(channel, Up)
    channel.send(at, b"six")
    assert until_seen(listener, Got).data == b"six"


def test_address_that_is_not_ours_is_named():
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:5600 cannot be used"):
        ZmqChannel("192.0.2.1", 5600, KEY)


# -- uninvited ---------------------------------------------------------------------------------------------------------

ANOTHER = AuthKey("a" * 32, "elsewhere")


@pytest.mark.parametrize(
    ("theirs", "ours", "said"),
    [
        (KEY, ANOTHER, f"it has another key or none, or is no side channel; this side has {ANOTHER}"),
        (KEY, None, "it wants a key; this side has none"),
        (None, KEY, f"; this side has {KEY}"),
    ],
    ids=["another key", "no key here", "no key there"],
)
def test_keys_that_differ_are_told_at_once_on_both_sides(opened, theirs, ours, said):
    listener, dialler = opened("127.0.0.1", 0, theirs), opened("127.0.0.1", 0, ours)
    started = time.monotonic()
    key = dialler.dial("127.0.0.1", listener.port)
    barred = until_seen(dialler, Barred)
    assert time.monotonic() - started < 2.0
    assert barred.key == key and barred.error.code == "wrong_key" and said in str(barred.error)
    # Where just one has a key, both see that the mechanisms differ, and the slower one just that the other has left.
    assert until_seen(listener, Uninvited).reason in (
        "wrong_key",
        *(["no_handshake"] if None in (ours, theirs) else []),
    )
    assert dialler.send(key, b"x") is False and dialler.poll(0.2) == [], "it isn't dialled again by itself"
    assert [one for one in listener.poll(0.0) if isinstance(one, Got)] == []
    listener.close()
    works(dialler, opened("127.0.0.1", listener.port, ours))


def works(dialler, listener):
    at = dialler.dial("127.0.0.1", listener.port)
    until_seen(dialler, Up, listener)
    dialler.send(at, b"fine")
    assert until_seen(listener, Got).data == b"fine"


def test_a_listener_that_dies_in_one_handshake_has_no_other_key(opened):
    """Once is no proof: the process may have been ended just then."""
    with socket.socket() as dying:
        dying.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        dying.bind(("127.0.0.1", 0))
        dying.listen()
        dialler = opened("127.0.0.1", 0, KEY)
        dialler.dial(*dying.getsockname())
        theirs, _ = dying.accept()
        theirs.recv(10)
        port = dying.getsockname()[1]
    theirs.close()
    assert [one for one in dialler.poll(0.1) if isinstance(one, Barred)] == []
    works(dialler, opened("127.0.0.1", port, KEY))


NOISE = {
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "random": bytes(range(256)) * 4,
    "half a greeting": b"\xff\0\0\0\0",
    "greeting of the plain mechanism": b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48),
    "curve and no hello": b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(47) + b"\x04\xc8\x05HELLO" + b"x" * 194,
    "a frame of an exabyte": b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(47) + b"\x06" + b"\x0f" + b"\xff" * 7,
    "nothing": b"",
}


@pytest.mark.parametrize("noise", NOISE.values(), ids=NOISE)
@pytest.mark.parametrize("key", [None, KEY], ids=["open", "locked"])
def test_bytes_that_are_no_side_channel_do_no_harm(opened, key, noise):
    listener, d = opened("127.0.0.1", 0, key), opened("127.0.0.1", 0, key)
    raws = [socket.create_connection(("127.0.0.1", listener.port)) for _ in range(20)]
    for raw in raws:
        raw.sendall(noise)
    for raw in raws[::2]:
        raw.close()
    heard = list(listener.poll(0.1))
    works(d, listener)
    assert [one for one in heard if isinstance(one, Got)] == []
    for raw in raws:
        raw.close()


def test_thousands_that_come_and_go_while_the_owner_is_busy(opened, channel):
    """Each leaves word for the owner, who doesn't poll. libzmq must go on: its thread carries everything else too."""
    other = opened("127.0.0.1", 0)
    at = channel.dial("127.0.0.1", other.port)
    until_seen(channel, Up)
    for _ in range(80):  # many at once are quicker
        raws = [socket.socket() for _ in range(40)]
        for raw in raws:
            raw.setblocking(False)
            raw.connect_ex(("127.0.0.1", channel.port))
        for raw in raws:
            raw.close()
    assert channel.send(at, b"still")
    assert until_seen(other, Got).data == b"still"


@pytest.mark.parametrize("size", [MAX_BYTES + 1, 2 * MAX_BYTES + 1])
def test_too_large_a_message_is_seen_or_ends_its_connection(opened, size):
    """The owner refuses the first one; the second is never put together."""
    listener, d = opened("127.0.0.1", 0, KEY), opened("127.0.0.1", 0, KEY)
    at = d.dial("127.0.0.1", listener.port)
    until_seen(d, Up)
    d.send(at, bytes(size))
    if size < 2 * MAX_BYTES:
        assert len(until_seen(listener, Got, d).data) == size
    else:
        assert until_seen(d, Down, listener).key == at
        assert not any(isinstance(one, Got) for one in listener.poll(0.0))


def test_message_of_many_frames_is_turned_away(channel):
    import zmq

    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(f"tcp://127.0.0.1:{channel.port}")
        stranger.send_multipart([b"a", b"b"])
        stranger.send_multipart([b""] * 1000)
        stranger.send(b"c")
        until, got = time.monotonic() + LIMIT_S, []
        while len(got) < 3:
            got += list(channel.poll(0.05))
            assert time.monotonic() < until
        assert got[:2] == [Uninvited("malformed")] * 2 and got[2].data == b"c"


def test_one_that_says_nothing_is_let_go(opened, monkeypatch):
    monkeypatch.setattr("kvferry.transfer.channel._HANDSHAKE_MS", 100)
    listener = opened("127.0.0.1", 0, KEY)
    with socket.create_connection(("127.0.0.1", listener.port)) as raw:
        assert until_seen(listener, Uninvited).reason == "no_handshake"
        raw.settimeout(LIMIT_S)
        while raw.recv(100):
            pass  # its greeting; then the end


def test_without_a_key_there_is_no_listener_beyond_loopback(caplog):
    for host in ("0.0.0.0", "::", "192.0.2.1"):
        with pytest.raises(ConfigError, match="binds to loopback only"):
            ZmqChannel(host, 0)
    with caplog.at_level("WARNING"):
        ZmqChannel("127.0.0.1", 0).close()
        ZmqChannel("127.0.0.1", 0, KEY).close()
    assert len([one for one in caplog.records if "loopback only" in one.getMessage()]) == 1


@pytest.mark.parametrize("host", ["a b c", "*"])
def test_what_can_be_no_address_is_an_error_and_leaves_nothing(host):
    channel = ZmqChannel("127.0.0.1", 0)
    try:
        with pytest.raises(PeerUnreachable, match="is no address"):
            channel.dial(host, 5600)
        assert channel._dialled == {} and list(channel.poll(0.0)) == []
    finally:
        channel.close()


def test_who_never_reads_is_owed_so_much_and_no_more(monkeypatch) -> None:
    """He is lost, counted, and others are served."""
    monkeypatch.setattr("kvferry.transfer.channel._MOST_UNSENT", 20)
    listener = ZmqChannel("127.0.0.1", 0)
    context = zmq.Context()
    mute, other = (context.socket(zmq.DEALER) for _ in range(2))
    try:
        for one in (mute, other):
            one.linger, one.rcvhwm = 0, 1
            one.connect(f"tcp://127.0.0.1:{listener.port}")
            one.send(b"hello")
            (got,) = [event for event in polled(listener) if isinstance(event, Got)]
            if one is mute:
                key = got.key
        sent = 0
        until = time.monotonic() + LIMIT_S
        while listener.send(key, bytes(1 << 20)):
            sent += 1
            assert sent < 200 and time.monotonic() < until, "it grows without end"
            time.sleep(0.001)  # ZMQ's thread fills the kernel's buffers
        assert sent >= 20
        assert not listener.send(key, b"more") and Uninvited("not_reading") in listener.poll(0)
        assert listener.poll(0) == []
        assert listener.send(got.key, b"you read") and other.poll(int(LIMIT_S * 1000)) and other.recv() == b"you read"
    finally:
        for one in (mute, other):
            one.close()
        context.destroy(linger=0)
        listener.close()


def test_a_listener_that_never_reads_is_lost_too(monkeypatch) -> None:
    monkeypatch.setattr("kvferry.transfer.channel._MOST_UNSENT", 20)
    context = zmq.Context()
    mute = context.socket(zmq.ROUTER)
    mute.linger, mute.rcvhwm = 0, 1
    dialler = ZmqChannel("127.0.0.1", 0)
    try:
        key = dialler.dial("127.0.0.1", mute.bind_to_random_port("tcp://127.0.0.1"))
        assert Up(key) in polled(dialler)
        sent = 0
        while dialler.send(key, bytes(1 << 20)):
            sent += 1
            assert sent < 200, "it grows without end"
            time.sleep(0.001)
        assert sent >= 20
        dialler.hang_up(key)  # as who sends does then
    finally:
        dialler.close()
        mute.close()
        context.destroy(linger=0)


def polled(channel: ZmqChannel) -> list:
    """The next events."""
    until = time.monotonic() + LIMIT_S
    while not (events := [event for event in channel.poll(0.05) if not (isinstance(event, Got) and not event.data)]):
        assert time.monotonic() < until
    return events
