"""Load from this project's own client: token-id prompts at absolute times, raw samples of each request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import version

from kvferry.bench import workload
from kvferry.bench.client import LoadClient, until_stopped
from kvferry.bench.load import Job, LoadRun
from kvferry.bench.mix import Asked, mixed
from kvferry.bench.records import Sample
from kvferry.launch.cancel import Cancel

WARM_UP = 2_000_000
"""Prompts of warm-up requests are numbered from here, so that none is a measured one."""


class BuiltinLoad:
    name = "builtin"
    overhead_s = 0.5
    texts = False
    tokenizer = False

    def version(self) -> str:
        return version("kvferry")

    def run(self, job: Job, cancel: Cancel, progress: Callable[[str], None]) -> LoadRun:
        asked = asked_of(job)
        prompts = [(i, one.tokens) for i, one in enumerate(asked)]
        sessions = {i: {"X-Session-ID": one.session} for i, one in enumerate(asked) if one.session}
        due = workload.send_times(job.num, job.qps, job.arrival, job.seed)
        lines: list[str] = []

        def done(sample: Sample) -> None:
            what = sample.error or f"ttft_ms={sample.ttft_ms:.2f} e2e_ms={sample.e2e_ms:.2f} tokens={sample.tokens}"
            lines.append(f"request {sample.index} lag_ms={sample.lag_ms:.2f} {what}")

        async def drive() -> tuple[list[Sample], int]:
            async with self._client(job, sessions) as client:
                warm = await client.one_by_one(_warm_prompts(job))
                lines.extend(f"warm-up {sample.index - WARM_UP}: {sample.error or 'ok'}" for sample in warm)
                return await client.at_times(prompts, due, done), sum(not sample.error for sample in warm)

        samples, warm = until_stopped(drive(), cancel)
        job.log.write_text("\n".join(lines) + "\n")
        first = min((sample.sent_s - sample.lag_ms / 1e3 for sample in samples), default=0.0)
        ends = [sample.sent_s + (sample.e2e_ms - sample.lag_ms) / 1e3 for sample in samples]
        return LoadRun(
            samples=samples,
            duration_s=max(ends, default=first) - first,
            starts_s=[sample.sent_s - first for sample in samples],
            warm_ups=warm,
            lag_source="each request's due time and send time",
        )

    def _client(self, job: Job, headers: Mapping[int, Mapping[str, str]]) -> LoadClient:
        most = max(1, job.num)
        return LoadClient(
            job.url, job.model, job.output_len, timeout_s=job.timeout_s, max_in_flight=most, headers=headers
        )


def asked_of(job: Job) -> list[Asked]:
    if job.kind == "mixed":
        return mixed(job.words, job.seed, job.input_len, job.num)
    return [Asked(workload.prompt(job.words, job.seed, job.input_len, i)) for i in range(job.num)]


def warm_up(job: Job, cancel: Cancel) -> int:
    """`job.warm_ups` requests like the measured ones, one after the other; how many went well."""

    async def drive() -> list[Sample]:
        async with LoadClient(job.url, job.model, job.output_len, timeout_s=job.timeout_s) as client:
            return await client.one_by_one(_warm_prompts(job))

    return sum(not sample.error for sample in until_stopped(drive(), cancel))


def _warm_prompts(job: Job) -> list[tuple[int, list[int]]]:
    return [
        (WARM_UP + i, workload.prompt(job.words, job.seed, job.input_len, WARM_UP + i)) for i in range(job.warm_ups)
    ]
