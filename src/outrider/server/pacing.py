"""Streams that tell an eavesdropper nothing: frames of one size at fixed intervals, whatever a step brought.
Else the times and sizes of encrypted chunks give away how many drafted tokens were accepted, and so what was said."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

FRAME = 4096  # bytes; what does not fit goes with the next frame


async def paced(events: AsyncGenerator[bytes, None], interval: float) -> AsyncGenerator[bytes, None]:
    """The same events, one frame every `interval` seconds, filled up with comments that clients pass over."""
    ready = bytearray()

    async def collect() -> None:
        async with aclosing(events):
            async for event in events:
                ready.extend(event)

    collecting = asyncio.create_task(collect())
    begin, tick = time.monotonic(), 0
    try:
        while True:
            tick = max(tick, int((time.monotonic() - begin) / interval)) + 1  # one that was missed is not made up for
            await asyncio.sleep(begin + tick * interval - time.monotonic())
            ended = collecting.done()  # looked at first: what came by then is in `ready`
            frame = bytes(ready[:FRAME])
            del ready[:FRAME]
            yield frame + _padding(FRAME - len(frame))
            if ended and not ready:
                break
        collecting.result()
    finally:  # perhaps because the client has gone
        collecting.cancel()
        await asyncio.gather(collecting, return_exceptions=True)


def _padding(num_bytes: int) -> bytes:
    """A comment of server-sent events. A full frame may end inside an event, and has none."""
    if num_bytes < 2:
        return b"\n" * num_bytes
    return b":" + b" " * (num_bytes - 2) + b"\n"
