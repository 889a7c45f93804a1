"""What one leg needs, for a policy."""

from __future__ import annotations

import msgspec

from kvferry.router.requests.prompt import Prompt


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """`tokens`: of the prompt, estimated where only text is known. `prompt`: its beginnings, None where nobody needs
    them. `session` "": none. `avoid`: URLs of engines that must not take it. `topology` "": any place will do."""

    model: str | None = None
    tokens: int = 0
    prompt: Prompt | None = None
    session: str = ""
    avoid: frozenset[str] = frozenset()
    topology: str = ""
