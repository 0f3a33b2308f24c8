"""Templates and tokenizers run beside the event loop. Long texts have a thread of their own, one at a time: whatever
they cost, a short one does not wait for them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel

from outrider.lanes import Lane
from outrider.overload import OverloadError
from outrider.server.errors import ApiError, bad_request, overloaded

SECONDS = 30.0  # for the chat template and the tokenizer
LONG = 2**16  # characters
# A text that is encoded by itself gains nothing from the library's own threads, and would wait for other texts there.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class Preparation:
    def __init__(self) -> None:
        self._short = Lane("prompts", num_threads=4, max_waiting=1024)
        self._long = Lane("long prompts", num_threads=1, max_waiting=8, niceness=5)

    async def run(self, work: Callable[[], Any], size: int, explain: Callable[[ValueError], ApiError]) -> Any:
        """What comes of it. `size`: about how many characters it is made of; `explain`: what a client is told."""
        try:
            future = (self._long if size > LONG else self._short).submit(work)
            return await asyncio.wait_for(asyncio.wrap_future(future), SECONDS)
        except TimeoutError:
            if future.cancelled():  # nobody had time for it
                raise overloaded(OverloadError("too many prompts are being prepared: try again later")) from None
            raise bad_request("the prompt takes too long to prepare: shorten it") from None
        except OverloadError as error:
            raise overloaded(error) from None
        except RecursionError:
            raise bad_request("the request is nested too deeply") from None
        except ValueError as error:
            raise explain(error) from error

    def close(self) -> None:
        self._short.close()
        self._long.close()


def size_of(given: Any) -> int:
    """About how many characters or tokens there are in what a client has sent, counted until it is long."""
    size, left = 0, [given]
    while left and size <= LONG:
        each = left.pop()
        if isinstance(each, str):
            size += len(each)
        elif isinstance(each, BaseModel):
            left += vars(each).values()
        elif isinstance(each, Mapping):
            left += [*each, *each.values()]
        elif isinstance(each, list) and each and isinstance(each[0], int):
            size += len(each)
        elif isinstance(each, list):
            left += each
        else:
            size += 1
    return size
