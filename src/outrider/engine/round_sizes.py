"""Numbers of requests and rows that rounds are recorded for: fine enough that nobody pays for many more."""

from __future__ import annotations

from collections.abc import Sequence

# numbers of requests that rounds are recorded for; those in between take the next larger one
NUM_SEATS = (1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60, 64,
             72, 80, 88, 96, 104, 112, 120, 128, 144, 160, 176, 192, 224, 256, 320, 384, 448, 512)  # fmt: skip
# rows of rounds in which prompts are read, and how many requests have room in each. On an H200 the linears of an 8B
# read 53,000 tokens a second at 1,024 and at 2,048 rows, 49,000 at 8,192: there is nothing to be had from more.
# Products come in tiles of 128 rows: 384 take hardly less than 512, and whoever comes with 512 has others beside him.
NUM_ROWS = (64, 128, 256, 512, 640, 768, 1024, 1536, 2048)
FEW_SEATS = (8, 32, 64, 128, 256, 512)
# where something is drafted, sizes come in larger steps: a seat that nobody takes has no rows of the target's pass
DRAFTING_SEATS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
# and where requests are many, a round need not have room for everybody's whole draft: rows for every seat
MANY_SEATS, MULTIPLE = 12, 8
ROWS_PER_SEAT = (1.5, 2, 2.5, 3, 4, 5, 6, 8, 12, 16, 24, 32)
MISSED_ROWS = (64, 256, 1024, 2048)  # rows that a drafter is shown at once after a rest


def seat_sizes(depth: int) -> Sequence[int]:
    """Numbers of requests that rounds are recorded for in which everybody decodes."""
    return DRAFTING_SEATS if depth else NUM_SEATS


def rows_between(num_seats: int, depth: int) -> list[int]:
    """Numbers of rows of rounds in which requests decode with drafts of such a depth: with room for all drafts, and, if
    requests are many, for parts of them."""
    parts = [each for each in ROWS_PER_SEAT if each < 1 + depth] if num_seats >= MANY_SEATS else []
    rows = [-(-int(num_seats * each) // MULTIPLE) * MULTIPLE for each in parts]
    return [*sorted({size for size in rows if size < num_seats * (1 + depth)}), num_seats * (1 + depth)]
