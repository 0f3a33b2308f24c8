"""Suffix drafting against the obvious search through all texts, its bounds, and the walls between tenants."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import LLM, SamplingParams
from outrider.drafters.suffix import Suffix
from outrider.drafters.suffix_tree import (
    NO_CHILDREN,
    Lengths,
    Node,
    SuffixCache,
    SuffixGuess,
    SuffixTree,
    TextFollower,
    TreeFollower,
    best_guess,
)

GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, trace=True)
SMALL: dict[str, Any] = {"max_model_len": 128, "page_size": 4}
TEXT = st.lists(st.integers(0, 3), min_size=1, max_size=20)
LENGTHS = st.builds(
    Lengths, st.integers(1, 6), st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([0.0, 0.1, 0.3, 0.6, 1.0])
)


def count(texts: list[list[int]], run: list[int]) -> int:
    """How often a run of tokens stands in the texts."""
    size = len(run)
    return sum(text[start : start + size] == run for text in texts for start in range(len(text) - size + 1))


def continuation(
    next_token: Callable[[list[int]], tuple[int, float] | None], match: list[int], lengths: Lengths
) -> Any:
    tokens: list[int] = []
    probability, score = 1.0, 0.0
    while len(tokens) < min(lengths.most, int(lengths.per_match * len(match) + 1e-6)):
        found = next_token(match + tokens)
        if found is None or probability * found[1] < lengths.least_probability:
            break
        probability *= found[1]
        score += probability
        tokens.append(found[0])
    return tuple(tokens), score


def obvious(next_token: Any, context: list[int], longest: int, lengths: Lengths) -> tuple[tuple[int, ...], float]:
    """Every match length is tried, the longest first; a shorter one must promise more to be taken."""
    best: tuple[tuple[int, ...], float] = ((), 0.0)
    for size in range(min(longest, len(context)), 0, -1):
        guess = continuation(next_token, context[-size:], lengths)
        best = guess if guess[1] > best[1] else best
    return best


def obvious_earlier(texts: list[list[int]], context: list[int], depth: int, lengths: Lengths) -> Any:
    """By how often runs of at most `depth` tokens stand in earlier texts; the smaller id of equals."""

    def next_token(run: list[int]) -> tuple[int, float] | None:
        found = [(count(texts, [*run, token]), -token) for token in range(4)]
        if len(run) >= depth or not max(found)[0]:
            return None
        times, token = max(found)
        return -token, times / count(texts, run)

    return obvious(next_token, context, depth - 1, lengths)


def obvious_own(text: list[int], longest: int, lengths: Lengths) -> Any:
    """By how often tokens followed in the text itself; the latest of equals."""

    def next_token(run: list[int]) -> tuple[int, float] | None:
        ends = [end for end in range(len(run), len(text)) if text[end - len(run) : end] == run]
        following = [text[end] for end in ends]
        if not following:
            return None
        most = max(following.count(token) for token in following)
        token = [token for token in following if following.count(token) == most][-1]
        return token, most / len(following)

    return obvious(next_token, text, longest, lengths)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(texts=st.lists(TEXT, min_size=1, max_size=4), context=TEXT, depth=st.integers(2, 7), lengths=LENGTHS)
def test_earlier_texts_against_the_obvious_search(
    texts: list[list[int]], context: list[int], depth: int, lengths: Lengths
) -> None:
    tree = SuffixTree(depth)
    for owner, text in enumerate(texts):
        tree.add(owner, text)
    guess = best_guess(TreeFollower(tree, context), min(depth - 1, len(context)), lengths)
    tokens, score = obvious_earlier(texts, context, depth, lengths)
    assert guess.tokens == tokens
    assert guess.score == pytest.approx(score)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(text=TEXT, longest=st.integers(1, 6), lengths=LENGTHS)
def test_the_own_text_against_the_obvious_search(text: list[int], longest: int, lengths: Lengths) -> None:
    longest = min(longest, len(text))
    guess = best_guess(TextFollower(np.array(text), longest), longest, lengths)
    tokens, score = obvious_own(text, longest, lengths)
    assert guess.tokens == tokens
    assert guess.score == pytest.approx(score)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(earlier=st.lists(TEXT, max_size=3), text=TEXT, depth=st.integers(2, 7), lengths=LENGTHS)
def test_the_better_of_both(earlier: list[list[int]], text: list[int], depth: int, lengths: Lengths) -> None:
    cache = SuffixCache(depth, 10, 1000)
    for each in earlier:
        cache.add(each, None)
    own = obvious_own(text, min(depth - 1, len(text)), lengths)
    shared = obvious_earlier(earlier, text, depth, lengths)
    assert cache.guess(np.array(text), None, lengths).tokens == (own[0] if own[1] >= shared[1] else shared[0])


def shape(node: Node) -> Any:
    """The tree by content: labels, counts, children."""
    return tuple(node.label()), node.count, tuple(sorted(shape(child) for child in node.children.values()))


def labels(node: Node) -> list[Node]:
    return [node, *(below for child in node.children.values() for below in labels(child))]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(texts=st.lists(TEXT, min_size=1, max_size=5), depth=st.integers(2, 7), data=st.data())
def test_what_was_removed_leaves_no_trace(texts: list[list[int]], depth: int, data: st.DataObject) -> None:
    gone = data.draw(st.lists(st.sampled_from(range(len(texts))), unique=True))
    tree, never = SuffixTree(depth), SuffixTree(depth)
    for owner, text in enumerate(texts):
        tree.add(owner, text)
        if owner not in gone:
            never.add(owner, text)
    for owner in gone:
        tree.remove(owner, texts[owner])
    assert shape(tree.root) == shape(never.root)
    assert not NO_CHILDREN
    nodes = labels(tree.root)
    assert not {node.owner for node in nodes} & set(gone), "a label still points into a text that was removed"
    alive = sum(len(text) for owner, text in enumerate(texts) if owner not in gone)
    assert len(nodes) <= 2 * alive + 1


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    texts=st.lists(st.tuples(TEXT, st.sampled_from([None, "a", "b"])), max_size=25),
    max_requests=st.integers(0, 5),
    max_tokens=st.integers(1, 60),
)
def test_bounds_hold_and_the_oldest_go_first(
    texts: list[tuple[list[int], str | None]], max_requests: int, max_tokens: int
) -> None:
    cache = SuffixCache(5, max_requests, max_tokens)
    kept: list[tuple[list[int], str | None]] = []
    for text, tenant in texts:
        cache.add(text, tenant)
        kept.append((text[-max_tokens:], tenant))
        while len(kept) > max_requests or sum(len(each) for each, _ in kept) > max_tokens:
            kept.pop(0)
        assert len(cache) == len(kept) <= max_requests
        assert cache.num_tokens == sum(len(each) for each, _ in kept) <= max_tokens
        assert set(cache.trees) == {tenant for _, tenant in kept}
        for owner, tree in cache.trees.items():
            expected = SuffixTree(5)
            for number, (each, tenant) in enumerate(kept):
                if tenant == owner:
                    expected.add(number, each)
            assert shape(tree.root) == shape(expected.root)


def test_a_request_that_was_of_use_stays_longer() -> None:
    cache = SuffixCache(8, 2, 1000)
    for first in (10, 20, 30):
        cache.add(list(range(first, first + 8)), None)
        if first == 20:
            used = cache.guess(np.array([10, 11, 12]), None, Lengths(3))
            assert used.tokens == (13, 14, 15)
    assert cache.guess(np.array([10, 11, 12]), None, Lengths(3)).tokens == (13, 14, 15)
    assert cache.guess(np.array([20, 21, 22]), None, Lengths(3)) == SuffixGuess()


# in the engine


def suffix(**options: Any) -> dict[str, Any]:
    names = {name: value for name, value in options.items() if name != "depth"}
    return {
        "method": "suffix",
        "num_speculative_tokens": options.get("depth", 6),
        "adaptive": False,
        **{f"suffix_decoding_{name}": value for name, value in names.items()},
    }


def cache_of(llm: LLM) -> SuffixCache:
    assert isinstance(llm.drafter, Suffix)
    return llm.drafter.cache


def test_drafts_round_by_round(target_path: Callable[..., Path]) -> None:
    """What the engine drafts is what the obvious search finds in the own text and in those that ended before."""
    path, prompts = target_path("llama"), [[3, 4, 5, 6, 3, 4, 5], [7, 8, 9, 7, 8]]
    lengths = Lengths(4, 2.0, 0.3)
    config = suffix(depth=4, max_tree_depth=10, max_spec_factor=2.0, min_token_prob=0.3)
    earlier: list[list[int]] = []
    accepted = 0
    with LLM(path, config, **SMALL) as llm:
        for prompt in [*prompts, prompts[0][:4], prompts[1] + [3, 4], prompts[1]]:
            (output,) = llm.generate([prompt], GREEDY)
            tokens = prompt + output.outputs[0].token_ids
            length = len(prompt) + 1
            for entry in output.outputs[0].trace or []:
                text = tokens[:length]
                own = obvious_own(text, 9, lengths)
                shared = slow_earlier(earlier, text, 10, lengths)
                expected = own[0] if own[1] >= shared[1] else shared[0]
                room = GREEDY.max_tokens or 0
                assert entry["draft"] == list(expected)[: room - (length - len(prompt)) - 1], f"after {length} tokens"
                length += entry["accepted"] + 1
                accepted += entry["accepted"]
            earlier.append(tokens)
    assert accepted > 20


def slow_earlier(texts: list[list[int]], context: list[int], depth: int, lengths: Lengths) -> Any:
    """obvious_earlier() for any vocabulary."""
    ids = {token: number for number, token in enumerate(sorted({token for text in texts for token in text}))}

    def next_token(run: list[int]) -> tuple[int, float] | None:
        found = [(count(texts, [*run, token]), -token) for token in ids]
        if len(run) >= depth or not found or not max(found)[0]:
            return None
        return -max(found)[1], max(found)[0] / count(texts, run)

    return obvious(next_token, context, depth - 1, lengths)


def test_a_second_request_profits_from_the_first(target_path: Callable[..., Path]) -> None:
    path, prompt = target_path("llama"), [5, 6, 7, 8]
    with LLM(path, suffix(), **SMALL) as llm:
        first, second = (llm.generate([prompt], GREEDY)[0].outputs[0] for _ in range(2))
    assert first.token_ids == second.token_ids
    assert second.speculation.accept_length > 4 > first.speculation.accept_length


def test_no_tenant_sees_another(target_path: Callable[..., Path]) -> None:
    """The same drafts, round by round, whatever other tenants have said before."""
    path, prompt = target_path("llama"), [5, 6, 7, 8]
    mine = replace(GREEDY, tenant="mine")
    with LLM(path, suffix(), **SMALL) as llm:
        untouched = llm.generate([prompt], mine)[0].outputs[0].trace
    with LLM(path, suffix(), **SMALL) as llm:
        llm.generate([prompt, [9, 10]], [replace(GREEDY, tenant="theirs"), GREEDY])  # nobody's is a tenant too
        (ours, theirs) = llm.generate([prompt] * 2, [mine, replace(GREEDY, tenant="theirs")])
        assert ours.outputs[0].trace == untouched
        assert theirs.outputs[0].speculation.accept_length > ours.outputs[0].speculation.accept_length
        assert set(cache_of(llm).trees) == {None, "mine", "theirs"}


def test_every_way_to_end_is_learnt_once_and_nothing_leaks(target_path: Callable[..., Path]) -> None:
    path = target_path("llama")
    with LLM(path, suffix(max_cached_requests=3), max_num_seqs=2, **SMALL) as llm:
        cache = cache_of(llm)
        for _ in llm.stream([3, 4, 5], GREEDY):  # left early: aborted
            break
        assert len(cache) == 1
        for number in range(8):  # slots are used again, requests wait for one another
            llm.generate([[number + 3, 4], [number + 9, 4, 5], [6]], replace(GREEDY, max_tokens=6))
            assert len(cache) == 3
        assert cache.num_tokens == sum(tree.root.count for tree in cache.trees.values()) <= 3 * (3 + 6)
    with LLM(path, suffix(max_cached_tokens=20), **SMALL) as llm:
        llm.generate([[3, 4, 5]] * 4, GREEDY)
        assert cache_of(llm).num_tokens == 20


def test_preempted_requests_are_learnt_when_they_end(target_path: Callable[..., Path]) -> None:
    path = target_path("llama")
    prompts = [[number + 3, 4, 5] for number in range(6)]
    with LLM(path, None, **SMALL) as llm:
        plain = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]
        page_bytes = llm.budget.page_bytes
    with LLM(path, suffix(), max_model_len=64, page_size=4, kv_cache_memory=page_bytes * 40) as llm:
        outputs = llm.generate(prompts, GREEDY)
        assert llm.engine.scheduler.num_preemptions > 0
        assert [output.outputs[0].token_ids for output in outputs] == plain
        assert len(cache_of(llm)) == len(prompts)
        assert cache_of(llm).num_tokens == sum(len(p) + len(t) for p, t in zip(prompts, plain, strict=True))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (suffix(max_tree_depth=1), "suffix_decoding_max_tree_depth must be a whole number from 2"),
        (suffix(max_cached_requests=-1), "suffix_decoding_max_cached_requests"),
        (suffix(max_cached_tokens=0), "suffix_decoding_max_cached_tokens"),
        (suffix(max_spec_factor="much"), "suffix_decoding_max_spec_factor must be a number"),
        (suffix(min_token_prob=1.5), "suffix_decoding_min_token_prob must be a number from 0 to 1"),
        ({**suffix(), "model": "somewhere"}, "takes no model"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_makes_no_sense_is_refused(
    config: dict[str, Any], message: str, target_path: Callable[..., Path], tmp_path: Path
) -> None:
    if "model" in config:
        config = {**config, "model": str(target_path("llama"))}
    with pytest.raises(ValueError, match=message):
        LLM(target_path("llama"), config, **SMALL)


def test_a_tenant_is_a_name() -> None:
    with pytest.raises(ValueError, match="tenant must be a name"):
        SamplingParams(tenant=3)  # type: ignore[arg-type]
