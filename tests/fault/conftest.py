"""Pairs of processes over NIXL, left empty."""

from __future__ import annotations

from nixl_pair import shm, start

__all__ = ["shm", "start"]
