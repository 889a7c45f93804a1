"""vLLM's server with a fault: while $KVFERRY_TEST_FLIP exists, one byte of each transfer is changed on the decode side,
after the last WRITE or READ and before it is looked at. Processes that the server spawns import this file again."""

from __future__ import annotations

import ctypes
import os
import runpy

from kvferry.protocol.messages import Landed, Register
from kvferry.transfer.peers import Peer
from kvferry.transfer.verify import Verifier

_fault = Verifier.fault


def fault(self: Verifier, peer: Peer, register: Register, message: Landed, read: bool) -> tuple[str, str]:
    if os.path.exists(os.environ["KVFERRY_TEST_FLIP"]) and register.end_token > register.start_token:
        planes = self._layout.planes
        plane = planes[len(planes) // 2]
        address = plane.base + register.block_ids[0] * plane.block_stride + 5
        cell = ctypes.c_ubyte.from_address(address)
        cell.value ^= 0x10
    return _fault(self, peer, register, message, read)


Verifier.fault = fault  # type: ignore[method-assign]

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
