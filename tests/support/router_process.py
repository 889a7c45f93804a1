"""The router's command in a process of its own."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

SCRIPT = """
import argparse, sys
from kvferry.errors import KVFerryError
from kvferry.router import main
parser = argparse.ArgumentParser()
main.add_arguments(parser)
try:
    sys.exit(main.run(parser.parse_args()))
except KVFerryError as error:
    sys.exit(f"kvferry: error: {error}")
"""


@asynccontextmanager
async def router(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        SCRIPT,
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
