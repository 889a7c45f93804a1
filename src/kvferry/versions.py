"""What is installed, asked without importing it."""

from __future__ import annotations

from importlib import metadata


def package_version(name: str) -> str | None:
    """None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
