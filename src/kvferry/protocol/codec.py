"""Messages <-> bytes: two magic bytes, one version byte, msgpack; an unknown version, tag or field is an error."""

from __future__ import annotations

import msgspec

from kvferry.protocol.messages import AnyMessage, Message

MAGIC = b"KF"
VERSION = 3

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


class WireError(ValueError):
    """Bytes that are no message of this version; the text is meant for both sides' logs."""


def encode(message: Message) -> bytes:
    return MAGIC + bytes([VERSION]) + _encoder.encode(message)


def decode(data: bytes) -> AnyMessage:
    """Raises `WireError`."""
    if len(data) < 3 or data[:2] != MAGIC:
        raise WireError(f"not a kvferry message: begins with {bytes(data[:8])!r}")
    if data[2] != VERSION:
        raise WireError(f"kvferry wire version {data[2]}, expected {VERSION}: run the same version on both sides")
    try:
        return _decoder.decode(memoryview(data)[3:])
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise WireError(f"malformed kvferry message: {error}") from error
