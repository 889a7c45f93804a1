"""Memory that is known by its address only, as arrays. Nothing keeps it alive: the caller sees to that."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


class _Interface:
    """What numpy (`__array_interface__`) and torch (`__cuda_array_interface__`) take memory of others by."""

    def __init__(self, name: str, address: int, read_only: bool, **facts: Any) -> None:
        setattr(self, name, {"data": (address, read_only), "version": 3, **facts})


def host_array(
    address: int, shape: tuple[int, ...], kind: str, strides: tuple[int, ...] | None = None, *, read_only: bool = False
) -> NDArray[Any]:
    """`kind`: numpy's type string. `strides`: in bytes; None: items adjoin."""
    return np.asarray(_Interface("__array_interface__", address, read_only, shape=shape, typestr=kind, strides=strides))


def device_array(address: int, shape: tuple[int, ...], kind: str, device: Any) -> Any:
    """A tensor; loads torch. `device`: a GPU."""
    import torch

    return torch.as_tensor(
        _Interface("__cuda_array_interface__", address, False, shape=shape, typestr=kind), device=device
    )
