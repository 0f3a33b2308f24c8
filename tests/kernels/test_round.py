"""Agreement, against the obvious loop."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.kernels.round import agree


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data())
def test_agree_is_the_longest_common_prefix(data: st.DataObject) -> None:
    num_requests, lookahead = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 6))
    token = st.integers(0, 2)
    choice = [[data.draw(token) for _ in range(lookahead + 1)] for _ in range(num_requests)]
    draft = [[data.draw(token) for _ in range(lookahead)] for _ in range(num_requests)]
    counts = [data.draw(st.integers(0, lookahead)) for _ in range(num_requests)]
    expected = []
    for row, guess, count in zip(choice, draft, counts, strict=True):
        accepted = 0
        while accepted < count and row[accepted] == guess[accepted]:
            accepted += 1
        expected.append(accepted)
    found = agree(
        torch.tensor(choice), torch.tensor(draft, dtype=torch.long).view(num_requests, lookahead), torch.tensor(counts)
    )
    assert found.tolist() == expected
