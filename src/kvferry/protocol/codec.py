"""Messages <-> bytes: two magic bytes, one version byte, msgpack; an unknown version, tag or field is an error."""

from __future__ import annotations

import msgspec

from kvferry.protocol.messages import AnyMessage, Message

MAGIC = b"KF"
VERSION = 4
MAX_BYTES = 8 << 20
"""Of one message: a registration of a million blocks takes 5 MiB."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


class WireError(ValueError):
    """Bytes that are no message of this version; the text is meant for both sides' logs."""


class OversizedError(WireError):
    """More bytes than any message has; nothing of them was looked at."""


def encode(message: Message) -> bytes:
    return MAGIC + bytes([VERSION]) + _encoder.encode(message)


def decode(data: bytes) -> AnyMessage:
    """Raises `WireError`."""
    if len(data) > MAX_BYTES:
        raise OversizedError(f"kvferry message of {len(data)} bytes, at most {MAX_BYTES} are taken")
    if len(data) < 3 or data[:2] != MAGIC:
        raise WireError(f"not a kvferry message: begins with {bytes(data[:8])!r}")
    if data[2] != VERSION:
        raise WireError(f"kvferry wire version {data[2]}, expected {VERSION}: run the same version on both sides")
    try:
        return _decoder.decode(memoryview(data)[3:])
    except (msgspec.ValidationError, msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"malformed kvferry message: {error}") from error
