"""What every side channel must do, over memory and over ZMQ."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque

import pytest

from kvferry.auth import AuthKey
from kvferry.errors import ConfigError, PeerUnreachable
from kvferry.transfer.channel import Down, Got, Up, ZmqChannel
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


def test_ipv6(channel):
    if not socket.has_ipv6:
        pytest.skip("no IPv6 in this Python")
    try:
        listener = ZmqChannel("::1", 0)
    except ConfigError as error:
        pytest.skip(f"no ::1 here: {error}")
    key = channel.dial("::1", listener.port)
    until = time.monotonic() + LIMIT_S
    while not any(isinstance(event, Up) for event in channel.poll(0.05)):
        assert time.monotonic() < until
    channel.send(key, b"six")
    assert any(isinstance(event, Got) and event.data == b"six" for event in listener.poll(LIMIT_S))
    listener.close()


def test_address_that_is_not_ours_is_named():
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:5600 cannot be used"):
        ZmqChannel("192.0.2.1", 5600, KEY)


def test_bytes_that_are_no_zmq_do_no_harm(channel):
    with socket.create_connection(("127.0.0.1", channel.port)) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n" + os.urandom(500))
        channel.poll(0.05)
    d = ZmqChannel("127.0.0.1", 0)
    key = d.dial("127.0.0.1", channel.port)
    until = time.monotonic() + LIMIT_S
    while not any(isinstance(event, Up) for event in d.poll(0.05)):
        assert time.monotonic() < until
    d.send(key, b"fine")
    while not any(isinstance(event, Got) and event.data == b"fine" for event in channel.poll(0.05)):
        assert time.monotonic() < until
    d.close()


def test_message_of_many_frames_is_dropped(channel):
    import zmq

    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(f"tcp://127.0.0.1:{channel.port}")
        stranger.send_multipart([b"a", b"b"])
        stranger.send(b"c")
        until, got = time.monotonic() + LIMIT_S, []
        while not got:
            got += [event.data for event in channel.poll(0.05) if isinstance(event, Got)]
            assert time.monotonic() < until
        assert got == [b"c"]


@pytest.mark.parametrize("host", ["a b c", "*"])
def test_what_can_be_no_address_is_an_error_and_leaves_nothing(host):
    channel = ZmqChannel("127.0.0.1", 0)
    try:
        with pytest.raises(PeerUnreachable, match="is no address"):
            channel.dial(host, 5600)
        assert channel._dialled == {} and list(channel.poll(0.0)) == []
    finally:
        channel.close()
