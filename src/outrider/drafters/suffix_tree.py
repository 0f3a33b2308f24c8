"""The host structure behind suffix drafting: which tokens followed which, in a text itself and in earlier ones.
Memory is bounded in requests and in tokens, and every tenant has a tree of its own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

NOBODY = -1  # owner of a label that is a copy
NO_CHILDREN: dict[int, Node] = {}  # of all leaves, which are most nodes: it is replaced, never filled
C = TypeVar("C")


@dataclass(frozen=True)
class SuffixGuess:
    """Tokens that may follow, and how many of them are expected to be right."""

    tokens: tuple[int, ...] = ()
    score: float = 0.0
    owner: int = NOBODY  # the newest request that contained the match and all of the tokens


@dataclass(frozen=True)
class Lengths:
    """How far a guess may go."""

    most: int
    per_match: float = 1.0  # tokens for each token of the match
    least_probability: float = 0.1  # of all tokens of the guess together

    def of(self, match_len: int) -> int:
        return min(self.most, int(self.per_match * match_len + 1e-6))


class ContextMatches(Protocol, Generic[C]):
    """Knows where the last tokens of a context occurred, and what stood there next."""

    def find(self, match_len: int) -> C | None:
        """The occurrences of the context's last `match_len` tokens."""

    def extend_match(self, place: C) -> tuple[int, float, C] | None:
        """The most frequent next token, its share among all next tokens, and the occurrences with it appended."""

    def owner(self, place: C) -> int: ...


def best_guess(follower: ContextMatches[C], longest_match: int, lengths: Lengths) -> SuffixGuess:
    """Of all match lengths the one whose continuation promises most; of equals, the longest match."""
    best = SuffixGuess()
    for match_len in range(longest_match, 0, -1):
        if best.score >= lengths.of(match_len):  # which no shorter match can surpass
            break
        place = follower.find(match_len)
        if place is not None:
            guess = _continuation(follower, place, lengths.of(match_len), lengths.least_probability)
            best = guess if guess.score > best.score else best
    return best


def _continuation(follower: ContextMatches[C], place: C, most: int, least_probability: float) -> SuffixGuess:
    tokens: list[int] = []
    probability, score = 1.0, 0.0
    while len(tokens) < most:
        found = follower.extend_match(place)
        if found is None or probability * found[1] < least_probability:
            break
        token, share, place = found
        probability *= share
        score += probability
        tokens.append(token)
    return SuffixGuess(tuple(tokens), score, follower.owner(place))


@dataclass(slots=True)
class Node:
    """One edge of the tree and what lies below: `tokens[start:end]` stands on it, and `count` suffixes pass its end."""

    tokens: Sequence[int]
    start: int
    end: int
    owner: int  # the request whose text `tokens` is: the newest that passed
    count: int
    children: dict[int, Node]

    def label(self) -> list[int]:
        return list(self.tokens[self.start : self.end])


class SuffixTree:
    """Every run of up to `depth` tokens of the texts in it, with how often it occurs. A node stands only where texts
    part or end, so that there are at most two for each token of the texts."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.root = Node((), 0, 0, NOBODY, 0, {})

    def add(self, owner: int, tokens: Sequence[int]) -> None:
        for start in range(len(tokens)):
            self._insert(owner, tokens, start, min(start + self.depth, len(tokens)))

    def remove(self, owner: int, tokens: Sequence[int]) -> None:
        """A text that was added is taken out: the tree is as if it had never been there."""
        for start in range(len(tokens)):
            self._take_out(owner, tokens, start, min(start + self.depth, len(tokens)))

    def _insert(self, owner: int, tokens: Sequence[int], at: int, end: int) -> None:
        node = self.root
        node.count += 1
        while at < end:
            child = node.children.get(tokens[at])
            if child is None:
                node.children = node.children or {}
                node.children[tokens[at]] = Node(tokens, at, end, owner, 1, NO_CHILDREN)
                return
            shared = _shared(child, tokens, at, end)
            if shared < child.end - child.start:
                child = node.children[tokens[at]] = _split(child, shared)
            child.count += 1
            child.tokens, child.start, child.end, child.owner = tokens, at, at + shared, owner
            at += shared
            node = child

    def _take_out(self, owner: int, tokens: Sequence[int], at: int, end: int) -> None:
        node = self.root
        node.count -= 1
        while at < end:
            child = node.children[tokens[at]]
            child.count -= 1
            if not child.count:
                del node.children[tokens[at]]
                break
            at += child.end - child.start
            if child.owner == owner:  # others still pass here; the text itself must not be kept for them
                child.tokens, child.owner = child.label(), NOBODY
                child.start, child.end = 0, len(child.tokens)
            node = child
        if node is not self.root:
            _join(node)


def _shared(node: Node, tokens: Sequence[int], at: int, end: int) -> int:
    """How many tokens the node's label and tokens[at:end] have in common; one at least."""
    most = min(node.end - node.start, end - at)
    if node.tokens[node.start : node.start + most] == tokens[at : at + most]:
        return most
    return next(n for n in range(1, most) if node.tokens[node.start + n] != tokens[at + n])


def _split(node: Node, length: int) -> Node:
    """A new node with the first `length` tokens of the label; the old one keeps the rest, and hangs below."""
    middle = node.start + length
    upper = Node(node.tokens, node.start, middle, node.owner, node.count, {node.tokens[middle]: node})
    node.start = middle
    return upper


def _join(node: Node) -> None:
    """A node at which nothing parts or ends any more becomes one with the only node below."""
    if len(node.children) != 1:
        return
    (child,) = node.children.values()
    if child.count == node.count:
        node.tokens, node.owner, node.children = node.label() + child.label(), child.owner, child.children
        node.start, node.end = 0, len(node.tokens)


@dataclass(frozen=True)
class TreeFollower:
    """Where a context occurred in a tree: a node, and how many tokens of its label have been read."""

    tree: SuffixTree
    context: Sequence[int]

    def find(self, match_len: int) -> tuple[Node, int] | None:
        node, read = self.tree.root, 0
        for token in self.context[-match_len:]:
            if node.start + read < node.end:
                if node.tokens[node.start + read] != token:
                    return None
                read += 1
                continue
            child = node.children.get(token)
            if child is None:
                return None
            node, read = child, 1
        return node, read

    def extend_match(self, place: tuple[Node, int]) -> tuple[int, float, tuple[Node, int]] | None:
        node, read = place
        if node.start + read < node.end:
            return node.tokens[node.start + read], 1.0, (node, read + 1)
        if not node.children:
            return None
        token, child = max(node.children.items(), key=lambda item: (item[1].count, -item[0]))
        return token, child.count / node.count, (child, 1)

    def owner(self, place: tuple[Node, int]) -> int:
        return place[0].owner


Places = NDArray[np.int64]


class TextFollower:
    """Where the end of a text occurred earlier in the same text: the indices of the tokens that came next."""

    def __init__(self, text: NDArray[np.int64], longest_match: int) -> None:
        self.text = text
        self.by_length: list[Places] = []  # one array for every match length from 1
        places = np.arange(1, len(text))
        for back in range(1, min(longest_match, len(text) - 1) + 1):
            places = places[places >= back]
            places = places[text[places - back] == text[-back]]
            if not len(places):
                break
            self.by_length.append(places)

    def find(self, match_len: int) -> Places | None:
        return self.by_length[match_len - 1] if match_len <= len(self.by_length) else None

    def extend_match(self, place: Places) -> tuple[int, float, Places] | None:
        """The token that followed most often; of equally frequent ones the latest."""
        place = place[place < len(self.text)]  # of the others it is not known yet what comes next
        if not len(place):
            return None
        following = self.text[place]
        _, kind, counts = np.unique(following, return_inverse=True, return_counts=True)
        token = following[counts[kind] == counts.max()][-1]
        same = place[following == token]
        return int(token), len(same) / len(place), same + 1

    def owner(self, place: Places) -> int:
        return NOBODY


@dataclass(frozen=True)
class Kept:
    tenant: str | None
    tokens: list[int]


class SuffixCache:
    """Texts of earlier requests, a tree for each tenant. The least recently used request is forgotten first."""

    def __init__(self, depth: int, max_requests: int, max_tokens: int) -> None:
        self.depth = depth
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self.trees: dict[str | None, SuffixTree] = {}
        self._kept: OrderedDict[int, Kept] = OrderedDict()  # the least recently used first
        self._next_owner = 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, tokens: Sequence[int], tenant: str | None) -> None:
        """Remembers a text, or its end where it is longer than all there is room for."""
        kept = Kept(tenant, list(tokens[-self.max_tokens :]))
        while self._kept and (
            len(self._kept) >= self.max_requests or self.num_tokens + len(kept.tokens) > self.max_tokens
        ):
            self._forget(next(iter(self._kept)))
        if not self.max_requests or not kept.tokens:
            return
        owner, self._next_owner = self._next_owner, self._next_owner + 1
        self._kept[owner] = kept
        self.num_tokens += len(kept.tokens)
        self.trees.setdefault(tenant, SuffixTree(self.depth)).add(owner, kept.tokens)

    def _forget(self, owner: int) -> None:
        kept = self._kept.pop(owner)
        self.num_tokens -= len(kept.tokens)
        tree = self.trees[kept.tenant]
        tree.remove(owner, kept.tokens)
        if not tree.root.count:
            del self.trees[kept.tenant]

    def guess(self, text: NDArray[np.int64], tenant: str | None, lengths: Lengths) -> SuffixGuess:
        """What may follow a text: judged by itself, and by the same tenant's earlier texts."""
        longest = min(self.depth - 1, len(text))
        own = best_guess(TextFollower(text, longest), longest, lengths)
        tree = self.trees.get(tenant)
        if tree is None:
            return own
        earlier = best_guess(TreeFollower(tree, text[-longest:].tolist()), longest, lengths)
        if own.score >= earlier.score:
            return own
        if earlier.owner in self._kept:
            self._kept.move_to_end(earlier.owner)
        return earlier
