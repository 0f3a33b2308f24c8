"""What an examination comes to: how the drafter was read, what was noticed, how often it is right, and a verdict."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from outrider.agreement import MIN_PLACES, Agreement
from outrider.types import Resolved

HEALTHY, FAULTY, MISREAD, DEAD, UNCLEAR = "healthy", "faulty", "misread", "dead", "unclear"
EXIT_STATUS = {HEALTHY: 0, FAULTY: 1, MISREAD: 1, DEAD: 1, UNCLEAR: 3}  # 2 is a mistake in the command
GOOD, NOTE, FAULT = "good", "note", "fault"
FIRST_BUCKET = 64  # tokens of context; every further bucket is twice as wide


@dataclass(frozen=True)
class Finding:
    """Something that can be known without running anything, or about the text."""

    level: str  # GOOD, NOTE (unusual, may be meant) or FAULT (cannot be right)
    subject: str
    message: str


@dataclass(frozen=True)
class Tried:
    """Another reading, and how it did at the same places as the one it was compared with."""

    name: str
    advice: str
    agreement: Agreement
    as_read: float = 1.0  # accept length of the one it was compared with, over the places that both drafted at
    gain: float = 0.0  # by how much this reading's accept length over these places is greater
    deviations: float = 0.0  # how many standard deviations of its own that is
    is_better: bool = False  # beyond doubt

    @property
    def accept_length(self) -> float:
        """Over the places that both drafted at: one that was given up early has drafted at few of them."""
        return self.as_read + self.gain

    def to_dict(self) -> dict[str, Any]:
        return {
            "reading": self.name,
            "accept_length": round(self.accept_length, 4),
            "accept_length_as_read": round(self.as_read, 4),
            "gain": round(self.gain, 4),
            "deviations": round(self.deviations, 2),
            "is_better": self.is_better,
            "advice": self.advice,
        }


@dataclass(frozen=True)
class ContextBucket:
    low: int
    high: int
    agreement: Agreement

    def to_dict(self) -> dict[str, Any]:
        places, mean = len(self.agreement.places), self.agreement.mean_accept_length
        return {"from": self.low, "to": self.high - 1, "drafts": places, "accept_length": round(mean, 4)}


@dataclass(frozen=True)
class DiagnosedPair:
    target: str
    architecture: str
    drafter: str
    method: str
    num_speculative_tokens: int
    dtype: str
    device: str


@dataclass
class Diagnosis:
    identity: DiagnosedPair
    provenance: dict[str, Resolved]
    agreement: Agreement  # as the checkpoint was read
    findings: list[Finding] = field(default_factory=list)
    tried: list[Tried] = field(default_factory=list)
    remedy: list[Tried] = field(default_factory=list)  # readings that, one after the other, make it better
    is_text: bool = True  # False: random ids, for want of a tokenizer; no drafter was trained to continue those
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        if self.remedy:
            return MISREAD
        if len(self.agreement.places) < MIN_PLACES:
            return UNCLEAR
        if not self.agreement.is_dead:
            return FAULTY if self.faults else HEALTHY
        return DEAD if self.is_text else UNCLEAR

    @property
    def faults(self) -> list[Finding]:
        return [each for each in self.findings if each.level == FAULT]

    @property
    def exit_status(self) -> int:
        return EXIT_STATUS[self.verdict]

    @property
    def advice(self) -> list[str]:
        """What to do, the most useful first."""
        if self.verdict == MISREAD:
            return [tried.advice for tried in self.remedy]
        if self.verdict == UNCLEAR:
            if not self.is_text:
                return ["random ids say little: give text that the target was made for, as ids, with --prompts"]
            return ["the answers were too short to tell: raise --max-tokens, or give other prompts with --prompts"]
        if self.verdict == HEALTHY:
            return []
        if self.verdict == FAULTY:
            return [f"{each.subject}: {each.message}" for each in self.faults]
        suspicions = [f"{each.subject}: {each.message}" for each in self.findings if each.level != GOOD]
        defaults = [name for name, each in self.provenance.items() if each.source.startswith("default")]
        if defaults:
            suspicions.append(f"nothing in the checkpoint says {', '.join(defaults)}: a default was taken")
        return [
            "no other reading of these weights does better: they were trained for another target or another revision "
            "of it, with another method, or not at all",
            *suspicions,
        ]

    @property
    def buckets(self) -> list[ContextBucket]:
        """Agreement by the length of the context."""
        longest = max((place.context_len for place in self.agreement.places), default=0)
        found, low, high = [], 0, FIRST_BUCKET
        while low <= longest:
            part = self.agreement.within(low, high)
            if part.places:
                found.append(ContextBucket(low, high, part))
            low, high = high, 2 * high
        return found

    def to_dict(self) -> dict[str, Any]:
        agreement, rounds = self.agreement, self.agreement.speculation
        return {
            "verdict": self.verdict,
            **asdict(self.identity),
            "accept_length": accept_length(agreement),
            "rounds": rounds.rounds,
            "drafts": len(agreement.places),
            "acceptance_per_position": [round(rate, 4) for rate in rounds.acceptance_per_position],
            "by_context_length": [bucket.to_dict() for bucket in self.buckets],
            "findings": [asdict(finding) for finding in self.findings],
            "provenance": {
                name: {"value": _plain(each.value), "source": each.source} for name, each in self.provenance.items()
            },
            "readings": [tried.to_dict() for tried in self.tried],
            "remedy": [tried.name for tried in self.remedy],
            "remedied_accept_length": accept_length(self.remedy[-1].agreement) if self.remedy else None,
            "advice": self.advice,
            "seconds": round(self.seconds, 2),
        }


def accept_length(agreement: Agreement) -> float:
    """Tokens a round, over the rounds that an engine would go through."""
    return round(agreement.speculation.accept_length, 4)


def _plain(value: Any) -> Any:
    """A value in a form that JSON knows."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
