"""What render workers and engines say they render and parse with, asked for and compared.

A silent difference splits an answer into the wrong content, reasoning and calls: so it is a refusal by name.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvferry.errors import CompatError, PeerUnreachable
from kvferry.render.settings import PATH, Difference, Settings, decode, differences
from kvferry.router.http.upstream import Upstream

TIMEOUT_S = 2.0


class Told(msgspec.Struct, frozen=True):
    """`worker`: the address of the process that answered, "" if it doesn't say."""

    settings: Settings
    worker: str = ""

    def agrees(self, other: Told) -> bool:
        return not _unlike(self.settings, other.settings)


class _Address(msgspec.Struct):
    worker: str = ""


async def ask(url: str, upstream: Upstream, api_key: str) -> Told:
    """Of a render worker. Raises `PeerUnreachable`."""
    answer = await upstream.get(url, PATH, api_key, TIMEOUT_S)
    if answer.status in (401, 403):
        raise PeerUnreachable(f"{url}{PATH} answered {answer.status}", hint="set --api-key to the workers' key")
    if answer.status != 200:
        raise PeerUnreachable(f"{url}{PATH} answered {answer.status}", hint="is it a `kvferry render`?")
    try:
        return Told(decode(answer.body), msgspec.json.decode(answer.body, type=_Address).worker)
    except msgspec.DecodeError as error:
        raise PeerUnreachable(f"{url}{PATH} answered no settings: {error}") from None


async def of_engine(url: str, upstream: Upstream, api_key: str) -> Settings | None:
    """None: it doesn't tell. Raises `PeerUnreachable` if it doesn't answer at all."""
    answer = await upstream.get(url, PATH, api_key, TIMEOUT_S)
    if answer.status != 200:
        return None
    try:
        return decode(answer.body)
    except msgspec.DecodeError:
        return None


def agree(url: str, told: object, others: Iterable[tuple[str, object]]) -> None:
    """Raises `CompatError` for a worker that renders unlike one of the others, each `Told` or not known."""
    for other, settings in others:
        if isinstance(told, Told) and isinstance(settings, Told):
            found = _unlike(settings.settings, told.settings)
            if found:
                name, theirs, ours = found[0]
                raise CompatError(
                    f"render worker {url}: {name} is {_shown(ours)}, that of {other} is {_shown(theirs)}",
                    hint="start all render workers with the same model and options",
                )


def fits(render: Settings, engine: Settings, what: str) -> None:
    """Raises `CompatError` in one line that names each setting and both values. `what`: the engine, in words."""
    found = differences(render, engine)
    if found:
        said = "; ".join(
            f"{name} is {_shown(theirs)}, the render tier's is {_shown(ours)}" for name, ours, theirs in found
        )
        hint = "start both with the same model, --chat-template, parsers and limits, or drop --render"
        raise CompatError(f"{what}: {said}", hint=hint)


def _unlike(one: Settings, other: Settings) -> list[Difference]:
    """Of two render workers: none of them may serve more names than the other."""
    return differences(one, other) or [(name, ours, theirs) for name, theirs, ours in differences(other, one)]


def _shown(value: object) -> str:
    text = "not set" if value == "" else repr(value)
    return text if len(text) <= 200 else text[:200] + "..."
