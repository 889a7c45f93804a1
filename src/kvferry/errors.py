"""Every error that kvferry raises or reports.

KVFerryError
|- ConfigError           400 local   a setting or argument is wrong; names field, value, what was expected
|- CompatError           409 remote  two engines cannot exchange KV; names the field and both values
|- PeerUnreachable       503 remote  the other side's channel does not answer, or went away
|  |- KeyRefused         503 remote  its side channel has another key than this side, or just one of the two has one
|- TransferError         502 remote  one transfer ended without its KV
|  |- TransferRefused    502 remote  the other side will not serve this transfer (unknown, ended, mode)
|  |- PromptMismatch     502 remote  prefill has another prompt under this transfer id
|  |- KvMismatch         502 remote  what landed is not what prefill computed; names the place
|  |- TransferTimeout    504 remote  a stated time passed
|- FabricError           502 local   a registration, post or read failed in the fabric
|- PlanError             502 local   block ids or token ranges that can't be turned into copies (protocol/plan.py)
|- UnexpectedEvent       500 local   a state machine got an event its table doesn't list (protocol/table.py)
|- EngineError           502 remote  an engine answered with a failure of its own, or not at all
|- InvariantBroken       500 local   something was left behind, or is in two places: a defect (`debug_invariants`)
|- LaunchError           -   local   a process of ours did not start; carries its last lines

`http_status` is what the router answers when the error ends a request; `hint` is what the user can do.
"""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable


class KVFerryError(Exception):
    """Base of all. `str(error)` is one line; `hint`, if any, is a second sentence for the user."""

    http_status = 500
    code = "internal_error"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class ConfigError(KVFerryError):
    http_status = 400
    code = "bad_configuration"


class CompatError(KVFerryError):
    http_status = 409
    code = "incompatible_engines"


class PeerUnreachable(KVFerryError):
    http_status = 503
    code = "peer_unreachable"


class KeyRefused(PeerUnreachable):
    code = "wrong_key"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint or "give all engines and routers the same auth_key_file")


class TransferError(KVFerryError):
    http_status = 502
    code = "transfer_failed"


class TransferRefused(TransferError):
    code = "transfer_refused"


class PromptMismatch(TransferError):
    code = "prompt_mismatch"


class KvMismatch(TransferError):
    code = "kv_mismatch"


class TransferTimeout(TransferError):
    http_status = 504
    code = "transfer_timeout"


class FabricError(KVFerryError):
    http_status = 502
    code = "fabric_error"


class EngineError(KVFerryError):
    http_status = 502
    code = "engine_error"


class InvariantBroken(KVFerryError):
    code = "invariant_broken"


class LaunchError(KVFerryError):
    code = "launch_failed"


def unknown_name(what: str, name: str, known: Iterable[str]) -> ConfigError:
    """The error for a name that is not one of `known`: names the nearest one."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"
    return ConfigError(f"{what}: unknown name {name!r}", hint=hint)


def side_channel_taken(host: str, port: int, error: OSError) -> ConfigError:
    """The error for a side channel that can't be listened on."""
    why = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror or error}"
    hint = "set side_channel_port in kv_connector_extra_config to a free port, or stop what listens there"
    return ConfigError(f"side channel {host}:{port} {why}", hint=hint)
