"""What every worker needs, imported once: workers are forked from a process that has imported this."""

from kvferry.render import frontend  # noqa: F401
