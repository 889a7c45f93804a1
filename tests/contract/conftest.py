"""The comparison is in a support module; a failed one shall show what differs."""

from collections.abc import AsyncIterator

import aiohttp
import pytest

pytest.register_assert_rewrite("contract_check")


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector, max_field_size=1 << 20) as session:
        yield session
