"""In which company questions are asked: alone, all at once, in another order, coming and going."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from typing import cast

from outrider.certify.questions import ProofRequest
from outrider.llm import LLM
from outrider.outputs import RequestOutput

OnStep = Callable[[int, int], None]
MOST_JOINING = 24  # questions at a time that come and go

Asker = Callable[[LLM, Sequence[ProofRequest], OnStep], list[RequestOutput]]


def ask_together(llm: LLM, questions: Sequence[ProofRequest], on_step: OnStep) -> list[RequestOutput]:
    return llm.generate([each.prompt for each in questions], [each.params for each in questions], on_step=on_step)


def ask_alone(llm: LLM, questions: Sequence[ProofRequest], on_step: OnStep) -> list[RequestOutput]:
    outputs, done = [], 0
    for question in questions:
        outputs += llm.generate(question.prompt, question.params)
        done += question.params.n
        on_step(done, 0)
    return outputs


def ask_shuffled(llm: LLM, questions: Sequence[ProofRequest], on_step: OnStep) -> list[RequestOutput]:
    order = list(range(len(questions)))
    random.Random(0).shuffle(order)
    outputs = ask_together(llm, [questions[place] for place in order], on_step)
    by_place = dict(zip(order, outputs, strict=True))
    return [by_place[place] for place in range(len(questions))]


def ask_joining(llm: LLM, questions: Sequence[ProofRequest], on_step: OnStep) -> list[RequestOutput]:
    """They come at random moments, while others read or answer. One in eight is asked once more by somebody who goes
    away in the middle of the answer."""
    chance = random.Random(2)
    outputs: dict[int, RequestOutput] = {}
    coming = [(place, False) for place in range(len(questions))]
    coming += [(place, True) for place in range(0, len(questions), 8)]
    chance.shuffle(coming)
    streams: list[tuple[int, bool, Generator[RequestOutput]]] = []
    done = 0
    while coming or streams:
        while coming and (not streams or (len(streams) < MOST_JOINING and chance.random() < 0.4)):
            place, leaves = coming.pop()
            stream = llm.stream(questions[place].prompt, questions[place].params)
            streams.append((place, leaves, cast(Generator[RequestOutput], stream)))
        place, leaves, stream = chosen = chance.choice(streams)
        output = next(stream)
        if output.finished or (leaves and chance.random() < 0.3):
            stream.close()
            streams.remove(chosen)
        if output.finished and not leaves:
            outputs[place] = output
            done += questions[place].params.n
            on_step(done, 0)
    return [outputs[place] for place in range(len(questions))]
