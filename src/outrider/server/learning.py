"""The drafter of a server that learns from what the server says, where those who ask allow it."""

from __future__ import annotations

from pathlib import Path

from outrider.llm import LLM
from outrider.server.log import log
from outrider.training.online import Judgement, OnlineLearner, OnlineOptions, check_online

__all__ = ["check_online", "learner_of"]


def learner_of(llm: LLM, directory: str) -> OnlineLearner:
    """It hears of every answer, and says in the log what became of it."""

    def judged(judgement: Judgement) -> None:
        event = "drafter swapped" if judgement.swapped else "drafter kept"
        log(event, version=judgement.version, before=round(judgement.before, 3), after=round(judgement.after, 3))

    learner = OnlineLearner(llm, OnlineOptions(Path(directory)), judged)
    llm.engine.drafting.listener = learner.heard
    return learner
