"""`outrider serve`: the engine behind OpenAI's HTTP interface. Needs the `serve` extra; nothing else does."""

from outrider.server.command import serve_command

__all__ = ["serve_command"]
