"""The picture of the dashboard in docs/, from a router that runs: `python scripts/shoot_dashboard.py URL OUT.png`.

Sends a few requests first, one that fails among them, and opens the steps of one. Needs Chromium, and the test extras.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

import aiohttp

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from browser import browsing, find  # noqa: E402

PROMPTS = (400, 6000, 1500, 12000, 300, 3000, 8000, 700, 2000, 5000, 900, 16000)


async def load(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{url}/v1/models") as response:
            model = (await response.json())["data"][0]["id"]

        async def ask(number: int, tokens: int, name: str) -> None:
            await asyncio.sleep(number * 0.15)
            body = {"model": name, "prompt": [7 + number] * tokens, "max_tokens": 32, "stream": True}
            body["stream_options"] = {"include_usage": True}
            async with session.post(f"{url}/v1/completions", json=body) as response:
                await response.read()

        await asyncio.gather(*(ask(number, tokens, model) for number, tokens in enumerate(PROMPTS)), ask(5, 9, "gone"))


async def main(url: str, out: str) -> None:
    program = find()
    if program is None:
        sys.exit("error: no Chromium on the PATH")
    await load(url)
    with tempfile.TemporaryDirectory() as profile:
        async with browsing(program, Path(profile), width=1440, height=900) as browser:
            await browser.open(f"{url}/dashboard")
            await browser.until("document.querySelectorAll('#requests tbody tr').length > 10")
            await browser.run("document.querySelectorAll('#requests tbody tr')[1].click()")
            shot = await browser.screenshot()
    await asyncio.to_thread(Path(out).write_bytes, shot)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} URL OUT.png")
    asyncio.run(main(sys.argv[1].rstrip("/"), sys.argv[2]))
