"""A drafting method of your own, whole, without a file of Outrider touched. docs/adding.md explains it.

python examples/add_a_drafter.py [MODEL]
"""

from __future__ import annotations

import sys

import torch

from outrider import LLM, SamplingParams
from outrider.config import SpeculativeConfig
from outrider.drafters.base import Drafter, drafters, no_draft
from outrider.models.base import Target
from outrider.types import Checkpoint, Draft, Hidden, Step, Verdict


@drafters.register("echo")
class Echo(Drafter):
    """What followed the newest token when it was last said; what followed that; and so on."""

    reads_tokens_only = True  # no layers, no checkpoint: it reads tokens alone

    def __init__(self, lookahead: int) -> None:
        super().__init__()
        self.lookahead = lookahead  # the most it ever drafts: the engine makes room for as much

    @classmethod
    def build(cls, settings: SpeculativeConfig, target: Target, checkpoint: Checkpoint | None) -> Echo:
        return cls(settings.num_speculative_tokens)

    def propose(self, step: Step, hidden: Hidden, verdict: Verdict) -> Draft:
        if not step.depth:  # nobody wants drafts in the next round
            return no_draft(step, self.lookahead)
        slots = step.batch.slots  # [B]
        text, newest = step.state.tokens[slots], (step.state.lengths[slots, None] - 1).clamp(min=0)  # [B, L], [B, 1]
        index = torch.arange(text.shape[1], device=text.device)
        tokens = text.new_zeros(len(slots), self.lookahead)  # always this wide, however few are wanted
        token, known, count = text.gather(1, newest), step.emits, torch.zeros_like(slots)  # no draft amid a prompt
        for number in range(step.depth):
            place = torch.where((text == token) & (index < newest), index, -1).amax(1, keepdim=True)
            known = known & (place[:, 0] >= 0)
            token = text.gather(1, place + 1)
            tokens[:, number] = token[:, 0]
            count += known
        return Draft(tokens, count)


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else None  # None: the embedded one
    prompt, params = "One bird, two birds, three birds. One bird, two", SamplingParams(temperature=0, max_tokens=48)
    settings = {"method": "echo", "num_speculative_tokens": 4, "adaptive": False}
    with LLM(model, speculative_config=settings) as drafted, LLM(model, speculative_config=None) as plain:
        (one,), (other,) = drafted.generate(prompt, params), plain.generate(prompt, params)
    assert one.outputs[0].token_ids == other.outputs[0].token_ids
    speculation = one.outputs[0].speculation
    print(f"{one.outputs[0].text!r}\nthe same as plainly; {speculation.accepted} of {speculation.drafted} drafts right")


if __name__ == "__main__":
    main()
