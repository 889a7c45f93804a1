"""The client's clock against a server whose delays are known."""

import asyncio
import json

import pytest
from aiohttp import web

from kvferry.bench.client import LoadClient


class Server:
    """Sends `events` (tokens each) after `first_s`, then every `gap_s`. `async with`; `url`."""

    def __init__(self, events=(1, 1, 1, 1), first_s=0.1, gap_s=0.03, status=200, usage=True, tail=("[DONE]",)):
        self.events, self.first_s, self.gap_s = events, first_s, gap_s
        self.status, self.usage, self.tail = status, usage, tail
        self.bodies = []
        self.arrived = []
        self.url = ""

    async def __aenter__(self):
        app = web.Application()
        app.router.add_post("/v1/completions", self.answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_):
        await self._runner.cleanup()

    async def answer(self, request):
        self.arrived.append(asyncio.get_running_loop().time())
        self.bodies.append(await request.json())
        if self.status != 200:
            return web.json_response({"error": {"message": "no"}}, status=self.status)
        response = web.StreamResponse(headers={"x-kvferry-transfer-id": f"t{len(self.bodies)}"})
        await response.prepare(request)
        total = 0
        for number, tokens in enumerate(self.events):
            await asyncio.sleep(self.gap_s if number else self.first_s)
            total += tokens
            event = {"choices": [{"text": "ab" * tokens}]}
            if self.usage:
                event["usage"] = {"completion_tokens": total}
            await self.say(response, json.dumps(event), cut=number == 1)
        for data in (json.dumps({"choices": [], "usage": {"completion_tokens": total}}), *self.tail):
            await self.say(response, data)
        return response

    async def say(self, response, data, cut=False):
        raw = f"data: {data}\n\n".encode()
        if cut:  # an event in two pieces counts when it is whole
            await response.write(raw[:9])
            await asyncio.sleep(0.01)
            raw = raw[9:]
        await response.write(raw)


async def ask(server, **options):
    async with LoadClient(server.url, "m", 4, **options) as client:
        return await client.ask(7, [1, 2, 3])


async def test_times_of_a_stream():
    async with Server() as server:
        sample = await ask(server)
    assert sample.error == ""
    assert (sample.index, sample.input_len, sample.tokens, sample.transfer_id) == (7, 3, 4, "t1")
    assert sample.text == "ab" * 4
    assert 95 < sample.ttft_ms < 200
    assert len(sample.itl_ms) == 3
    assert sample.itl_ms[0] > 38  # with the pause inside the event
    assert sample.tpot_ms == pytest.approx(sum(sample.itl_ms) / 3)
    assert 28 < sample.tpot_ms < 80
    assert sample.e2e_ms == pytest.approx(sample.ttft_ms + sum(sample.itl_ms))


async def test_what_is_asked():
    async with Server() as server:
        await ask(server)
    body = server.bodies[0]
    assert body["prompt"] == [1, 2, 3]
    assert (body["max_tokens"], body["ignore_eos"], body["temperature"], body["stream"]) == (4, True, 0.0, True)


async def test_several_tokens_in_one_event():
    async with Server(events=(2, 3, 1)) as server:
        sample = await ask(server)
    assert (sample.tokens, sample.first_tokens, len(sample.itl_ms)) == (6, 2, 2)
    assert sample.tpot_ms == pytest.approx(sum(sample.itl_ms) / 4)


async def test_a_server_that_counts_nothing():
    async with Server(usage=False) as server:
        assert (await ask(server)).tokens == 4


async def test_a_single_token_has_no_time_per_further_token():
    async with Server(events=(1,)) as server:
        assert (await ask(server)).tpot_ms is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"status": 503}, "503"),
        ({"tail": ()}, "without [DONE]"),
        ({"tail": ('{"error": {"message": "engine died"}}',)}, "engine died"),
    ],
)
async def test_failures_are_told(options, said):
    async with Server(**options) as server:
        assert said in (await ask(server)).error


@pytest.mark.parametrize(
    "event",
    ['{"choices": [{"text": "a"}], "usage": {"total": 3}}', '{"choices": [3], "usage": {"completion_tokens": 9}}'],
)
async def test_an_event_that_is_no_completion_is_a_failure(event):
    async with Server(tail=(event, "[DONE]")) as server:
        assert "an event that is no completion" in (await ask(server)).error


async def test_an_event_without_text_counts_its_token():
    async with Server(tail=('{"choices": [{"text": null}], "usage": {"completion_tokens": 5}}', "[DONE]")) as server:
        sample = await ask(server)
    assert (sample.error, sample.tokens, sample.text) == ("", 5, "ab" * 4)


async def test_timeout_and_nobody_there():
    async with Server(first_s=5) as server:
        assert "within 0.2 s" in (await ask(server, timeout_s=0.2)).error
        url = server.url
    server.url = url
    assert (await ask(server)).error


async def test_one_by_one_stops_at_the_first_failure():
    async with Server(status=500) as server, LoadClient(server.url, "m", 4) as client:
        samples = await client.one_by_one([(i, [i]) for i in range(3)])
    assert len(samples) == len(server.bodies) == 1


async def test_open_loop_keeps_its_times_though_answers_are_slow():
    async with Server(first_s=0.5) as server, LoadClient(server.url, "m", 4) as client:
        samples = await client.at_times([(i, [i]) for i in range(4)], [0.0, 0.1, 0.2, 0.3])
    gaps = [later - before for before, later in zip(server.arrived, server.arrived[1:], strict=False)]
    assert all(0.05 < gap < 0.2 for gap in gaps)
    assert [sample.index for sample in samples] == [0, 1, 2, 3]
    assert all(sample.lag_ms < 80 for sample in samples)


async def test_what_waits_for_its_turn_is_late():
    async with Server(events=(1, 1), first_s=0.2) as server, LoadClient(server.url, "m", 2, max_in_flight=1) as client:
        samples = await client.at_times([(0, [0]), (1, [1])], [0.0, 0.0])
    late = max(samples, key=lambda sample: sample.lag_ms)
    assert late.lag_ms > 180
    assert late.ttft_ms > 380  # from when it was due
