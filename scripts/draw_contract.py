"""Write docs/contract.md from the differential suite's table: `python scripts/draw_contract.py`. A test checks it."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

from contract_case import Case  # noqa: E402
from contract_cases import CASES, GENERAL, RENDERED  # noqa: E402

HEAD = """# Two engines that answer like one

Drawn from the table in `tests/support/contract_cases.py` by `scripts/draw_contract.py`; do not edit.

A client that talks to the router gets what one `vllm serve` would send: status, body, the events of a stream with their
order and fields. Each line below is a request that `tests/contract` sends to one engine and, through the router, to a
pair. *sim*: transport-real engines, in the modes push, pull and stream, and those of `/inference/v1/generate` with
`--first-token prefill` too (pull, and stream bound late). *vLLM*: vLLM on CPU, greedy, push; logprobs may
be off by 1e-3. Taken out before comparing: ids, times of creation, fingerprints, and where a stream is cut into events
(an engine joins tokens that wait); the texts, ids and scores of a choice are joined again, the fields of its events and
the order of kinds of events are kept.

"""

LEGS = """
## Who makes what

| Part of a reply | From |
|---|---|
| text, tool calls, reasoning, token ids, `logprobs`, `finish_reason`, `completion_tokens` | the decode engine |
| `prompt_tokens_details`, `input_tokens_details`, whole and in a stream's last event | the prefill engine |
| `prompt_logprobs`, the prompt's part of `echo` with `logprobs` | the prefill engine; decode is never asked |
| a refusal (4xx) | the decode engine, which gets the client's own body; else the prefill engine |
| `/tokenize`, `/detokenize`, `/version`, renderings, embeddings and scores | one decode engine, as it is |
| the first token with `--first-token prefill`, where [it may be](router.md#the-first-token) | the prefill engine |
| an echo with `max_tokens` 0 | one prefill engine, as it is |
| a body that is no JSON object | one decode engine's refusal |

Of a stream the router parses only the events that it edits: the one with the counts, where the engines tell of their
cache; all of an `echo` with `logprobs`; all of several prompts. The rest goes through as bytes.

"""


TIER = """
## Behind a render tier

With `--render` the text of completions, chats and responses is made by vLLM's own frontend, in a render worker, and
both engines get token ids. The same {count} cases run on simulated engines through a tier and are compared with one
engine without. A refusal of the request's form, and a body that is no JSON object, are the worker's word then;
`/tokenize`, `/detokenize`, renderings and derenderings are one worker's. What differs besides:

| Difference | Why | Tested in |
|---|---|---|
"""


def page() -> str:
    equal = [case for case in CASES if case.differs is None]
    other = [case for case in CASES if case.differs is not None]
    said = (
        f"{len(CASES)} cases: {len(equal)} are equal, {len(other)} differ as stated. "
        f"{tier('sim')} run on simulated engines in three modes, {tier('vllm')} on vLLM.\n"
    )
    lines = [
        HEAD,
        said,
        LEGS,
        "## Where the pair differs\n\n| Request | Route | One engine | The pair | Why |\n|---|---|---|---|---|\n",
    ]
    for case in other:
        assert case.differs is not None
        pair = case.differs.status or case.status
        named = f", names `{case.differs.param}`" if case.differs.param else ""
        lines.append(
            f"| {case.name} | `{case.method} {case.route}` | {case.status} | {pair}{named} | {case.differs.why} |\n"
        )
    lines.append("\nFor every request:\n\n| Difference | Why | Tested in |\n|---|---|---|\n")
    lines += [f"| {what} | {why} | `{where}` |\n" for what, why, where in GENERAL]
    lines += [TIER.format(count=tier("sim"))]
    lines += [
        f"| {case.name} | {case.rendered.why} | `tests/contract/test_render.py` |\n" for case in CASES if case.rendered
    ]
    lines += [f"| {what} | {why} | `{where}` |\n" for what, why, where in RENDERED]
    lines.append("\n## Where it is equal\n")
    for route in dict.fromkeys(case.route for case in equal):
        lines.append(f"\n### `{route}`\n\n| Request | Status | Engines |\n|---|---|---|\n")
        lines += [row(case) for case in equal if case.route == route]
    return "".join(lines)


def tier(name: str) -> int:
    return sum(name in case.tiers for case in CASES)


def row(case: Case) -> str:
    names = {"sim": "sim", "vllm": "vLLM"}
    return f"| {case.name} | {case.status} | {', '.join(names[one] for one in case.tiers)} |\n"


if __name__ == "__main__":
    (ROOT / "docs" / "contract.md").write_text(page())
