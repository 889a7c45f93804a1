"""The dashboard in a real headless Chromium: what it shows, that nothing in it can be markup, and the key."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, browsing, find
from scripted import COMPLETIONS, MODEL, Call, begin_stream, event, refuse, serving, usage

pytestmark = pytest.mark.skipif(find() is None, reason="no Chromium on the PATH (Debian: apt-get install chromium)")

MARKUP = "<img src=x onerror=\"document.title='owned'\">"
KEY = "0123456789abcdef-admin"


@pytest.fixture
async def browser(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Browser]:
    program = find()
    assert program is not None
    async with browsing(program, tmp_path_factory.mktemp("profile")) as made:
        yield made


async def told(call: Call) -> Any:
    response = await begin_stream(call)
    for text in "abc":
        await response.write(event(text))
        await asyncio.sleep(0.01)
    await response.write(f"data: {json.dumps({'choices': [], 'usage': usage(7, 3)})}\n\ndata: [DONE]\n\n".encode())
    await response.write_eof()
    return response


async def test_what_it_shows(browser: Browser) -> None:
    async with serving() as pair:
        pair.d.script = told
        await browser.open(pair.url + "/dashboard")
        await browser.until("document.querySelectorAll('#engines tbody tr').length === 2")
        body = {"model": MODEL, "prompt": "x", "stream": True}
        _, headers, _ = await pair.post(COMPLETIONS, body, X_Request_Id=MARKUP)
        pair.p.script = refuse(400, {"error": {"message": "no", "code": 400}})
        await pair.complete()
        await pair.complete(model=MARKUP)
        await browser.until("document.querySelectorAll('#requests tbody tr').length === 3")
        rows = await browser.run("[...document.querySelectorAll('#requests tbody tr')].map((row) => row.innerText)")
        assert MARKUP in rows[0] and "400" in rows[0] and MODEL in rows[1] and "7 + 3" in rows[2]
        assert pair.p.url.removeprefix("http://") in rows[2]
        await browser.run("document.querySelectorAll('#requests tbody tr')[2].click()")
        details = await browser.run("document.querySelector('#requests td.wide').innerText")
        assert headers["x-kvferry-transfer-id"] in details and MARKUP in details
        assert "first token" in details and "took" in details
        assert await browser.run("document.querySelectorAll('.bar i').length") >= 4
        errors = await browser.run("[...document.querySelectorAll('#errors tbody tr')].map((row) => row.innerText)")
        assert len(errors) == 2 and pair.p.url in errors[0] and "engine_error" in errors[0]
        assert await browser.run("document.querySelectorAll('img').length") == 0
        assert await browser.run("document.title") == "kvferry router" and browser.logged == []
        pair.d.health = 503
        await browser.until("document.getElementById('state').textContent.includes('no decode')")


async def test_a_router_that_began_anew(browser: Browser) -> None:
    async with serving() as pair:
        for _ in range(3):
            await pair.complete()
        await browser.open(pair.url + "/dashboard")
        await browser.until("document.querySelectorAll('#requests tbody tr').length === 3")
        port = int(pair.url.rsplit(":", 1)[1])
    await browser.until("document.getElementById('state').textContent.includes('does not answer')")
    async with serving(port=port) as pair:
        await pair.complete()
        await browser.until("document.querySelectorAll('#requests tbody tr').length === 1")


async def test_it_asks_for_the_key(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(KEY)
    path.chmod(0o600)
    async with serving(admin_port=0, admin_key_file=str(path)) as pair:
        await browser.open(pair.running.admin_url + "/dashboard")
        for key, seen in (("wrong-wrong-wrong-wrong", "this key is not known"), (KEY, "ready")):
            await browser.until("getComputedStyle(document.getElementById('key')).display !== 'none'")
            assert await browser.run("document.querySelectorAll('#engines tbody tr').length") == 0
            await browser.run(f"document.getElementById('secret').value = {json.dumps(key)}")
            await browser.run("document.querySelector('#key button').click()")
            await browser.until(f"document.body.innerText.includes({json.dumps(seen)})")
        await browser.until("document.querySelectorAll('#engines tbody tr').length === 2")
        assert KEY not in await browser.run("location.href + document.documentElement.outerHTML")
        assert await browser.run("document.cookie + localStorage.length") == "0"
