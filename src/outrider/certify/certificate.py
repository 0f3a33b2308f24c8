"""What a proof comes to: counts for every case, the checks on the checker, and a verdict."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

from outrider import __version__
from outrider.certify.comparison import Divergence
from outrider.certify.distribution import DrawTest
from outrider.outputs import RequestOutput
from outrider.sampling_params import accept_length

PROVEN, MISMATCH, INCONCLUSIVE = "proven", "mismatch", "inconclusive"
EXIT_STATUS = {PROVEN: 0, MISMATCH: 1, INCONCLUSIVE: 3}


@dataclass
class CertifiedCounts:
    requests: int = 0
    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    ended: int = 0  # rounds whose last token is the draft's: the answer ended there
    zero_draft_rounds: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    mismatches: int = 0

    @property
    def rejected(self) -> int:
        return self.drafted - self.accepted

    @property
    def accept_length(self) -> float:
        return accept_length(self.rounds, self.accepted, self.ended)

    def add(self, output: RequestOutput) -> None:
        self.requests += 1
        self.prefix_hit_tokens += output.num_cached_tokens
        for completion in output.outputs:
            how = completion.speculation
            self.tokens += len(completion.token_ids)
            self.rounds += how.rounds
            self.drafted += how.drafted
            self.accepted += how.accepted
            self.ended += how.ended
            self.zero_draft_rounds += how.rounds - (how.drafted_at[0] if how.drafted_at else 0)

    def __iadd__(self, other: CertifiedCounts) -> CertifiedCounts:
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))
        return self

    def to_dict(self) -> dict[str, int]:
        return asdict(self) | {"rejected": self.rejected}


@dataclass
class Case:
    """All questions with one option and one temperature, asked in one way."""

    composition: str
    option: str
    temperature: float
    counts: CertifiedCounts = field(default_factory=CertifiedCounts)

    def to_dict(self) -> dict[str, Any]:
        named = {"composition": self.composition, "option": self.option, "temperature": self.temperature}
        return named | self.counts.to_dict()


@dataclass(frozen=True)
class CertifiedPair:
    """What was certified, and with what."""

    model: str
    architecture: str
    num_parameters: int
    drafter: str
    num_speculative_tokens: int
    dtype: str
    device: str
    exact: bool = False

    def versions(self) -> dict[str, str]:
        return {"outrider": __version__, "torch": torch.__version__, "python": platform.python_version()}


@dataclass
class Certificate:
    identity: CertifiedPair
    cases: list[Case] = field(default_factory=list)
    preemptions: dict[str, int] = field(default_factory=dict)  # by composition; they belong to no single case
    first_divergence: Divergence | None = None
    largest_logprob_difference: float = 0.0
    control_mismatches: int = 0  # plain against plain: alone and in company
    self_check: bool = False  # a token that was changed on purpose was noticed
    draws: list[DrawTest] = field(default_factory=list)
    recorded_rounds: int = 0  # rounds of speculative engines that were replayed from CUDA graphs
    seconds: float = 0.0

    @property
    def counts(self) -> CertifiedCounts:
        total = CertifiedCounts(preemptions=sum(self.preemptions.values()))
        for case in self.cases:
            total += case.counts
        return total

    @property
    def compositions(self) -> list[str]:
        return list(dict.fromkeys(case.composition for case in self.cases))

    @property
    def verdict(self) -> str:
        if self.counts.mismatches or any(test.differs for test in self.draws):
            return MISMATCH
        return INCONCLUSIVE if self.doubts else PROVEN

    @property
    def exit_status(self) -> int:
        return EXIT_STATUS[self.verdict]

    @property
    def doubts(self) -> list[str]:
        """Why a run without a mismatch would still prove nothing."""
        counts = self.counts
        found = []
        if not counts.accepted:
            found.append("no draft token was accepted, so speculation was never at work: try a better drafter")
        if not counts.rejected:
            found.append("no draft token was rejected, so the way back was never tried: raise num_speculative_tokens")
        if not self.self_check:
            found.append("a token changed on purpose was not noticed, so the comparison itself is broken")
        for test in self.draws:
            if not test.control_rejected:
                found.append(
                    f"the test of the {test.name} could not tell a wrong distribution from the right one: add prompts "
                    "whose next word is neither certain nor arbitrary"
                )
        return found

    @property
    def not_exercised(self) -> list[str]:
        """What this run happened not to meet; no doubt about the rest."""
        counts = self.counts
        met = {
            "rounds without a draft": counts.zero_draft_rounds,
            "preemptions": counts.preemptions,
            "prefix hits": counts.prefix_hit_tokens,
            "drafts in the statistical part": sum(test.drafted for test in self.draws),
        }
        return [name for name, count in met.items() if not count]

    def to_dict(self) -> dict[str, Any]:
        divergence = self.first_divergence
        return {
            "verdict": self.verdict,
            **asdict(self.identity),
            "versions": self.identity.versions(),
            "counts": self.counts.to_dict(),
            "doubts": self.doubts,
            "not_exercised": self.not_exercised,
            "largest_logprob_difference": self.largest_logprob_difference,
            "self_check": self.self_check,
            "control_mismatches": self.control_mismatches,
            "distribution": [test.to_dict() for test in self.draws],
            "preemptions": self.preemptions,
            "recorded_rounds": self.recorded_rounds,
            "cases": [case.to_dict() for case in self.cases],
            "first_divergence": divergence.to_dict() if divergence is not None else None,
            "seconds": round(self.seconds, 2),
        }
