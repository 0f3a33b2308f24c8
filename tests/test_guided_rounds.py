"""Guided requests in recorded rounds (replay.py): the target's next pass begins before the outcome of the last round is
read, then grammars are asked, then tokens are chosen. Whoever joins or leaves, the text is the plain one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider import LLM, SamplingParams
from outrider.engine.flight import Flight
from outrider.engine.graphs import MASKED, GraphKey, Graphs, Part, RecordedRound
from outrider.engine.request import Request, Work
from outrider.engine.round import EagerRound
from outrider.sampling_params import Guided
from outrider.types import Outcome

pytest.importorskip("xgrammar")
pytestmark = pytest.mark.usefixtures("recording")

DRAFTER = {"method": "ngram", "prompt_lookup_min": 1}
FREE = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, trace=True)
ANSWER = replace(FREE, ignore_eos=False)
WORDS = Guided(regex="(yes|no|maybe)( and (yes|no|maybe)){6}")
FORM = Guided(regex='\\{"first_name":"[A-Za-z]{1,8}","kind":"(an animal|a machine)"\\}')
OBJECT = Guided(json_schema={"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]})
KINDS = {
    "free": FREE,
    "free, sampled": replace(FREE, temperature=0.8, seed=3),
    "free, filtered": replace(FREE, temperature=1.0, seed=4, top_p=0.9, top_k=40),
    "free, penalised": replace(FREE, repetition_penalty=1.2, min_tokens=5),
    "words": replace(ANSWER, guided=WORDS),
    "words, sampled": replace(ANSWER, guided=WORDS, temperature=0.9, seed=5),
    "words, penalised": replace(ANSWER, guided=WORDS, temperature=0.7, seed=6, presence_penalty=0.5, min_tokens=9),
    "form": replace(ANSWER, guided=FORM),
    "form, filtered": replace(ANSWER, guided=FORM, temperature=1.0, seed=7, top_p=0.8),
    "object": replace(ANSWER, guided=OBJECT, temperature=1.0, seed=8, logprobs=1),
    "choice": replace(ANSWER, guided=Guided(choice=["a dog and a dog and a cat", "a dog and nothing"]), seed=9),
}
PROMPTS = ["Once upon a time", "The sun is", "Is it so? yes and no and yes and", "A cat sat on the mat"]


class Seen:
    """What an engine did, in order."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.outcomes: list[tuple[Work, Outcome]] = []
        self.events: list[tuple[str, list[Work]]] = []
        self.num_eager = 0
        engine, settle, land = llm.engine, llm.engine._settle, llm.engine._land
        forward, eager = RecordedRound.forward, EagerRound.forward

        def note_outcome(work: Work, outcome: Outcome, logits: Any) -> None:
            self.outcomes.append((work, outcome))
            settle(work, outcome, logits)

        def note_forward(parts: RecordedRound) -> None:
            self.events.append(("forward", list(parts._plan)))
            forward(parts)

        def note_eager(parts: EagerRound) -> None:
            self.num_eager += 1
            eager(parts)

        def note_landing(flight: Flight) -> list[Request]:
            self.events.append(("land", flight.plan))
            return land(flight)

        monkeypatch.setattr(engine, "_settle", note_outcome)
        monkeypatch.setattr(engine, "_land", note_landing)
        monkeypatch.setattr(RecordedRound, "forward", note_forward)
        monkeypatch.setattr(EagerRound, "forward", note_eager)

    def num_ahead(self) -> int:
        """Passes with a guided request that began while an earlier round of the same request had not landed."""
        count, flying = 0, list[Request]()
        for event, plan in self.events:
            guided = [work.request for work in plan if work.request.guide is not None and work.emits]
            if event == "forward":
                count += any(request in flying for request in guided)
                flying += guided
            else:
                for request in guided:
                    flying.remove(request)
        return count


def steps_of(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Notes what the host does from now on, in order: which rounds it launches in which parts, which it waits for, and
    whose outcome it looks at."""
    steps: list[tuple[str, Any]] = []
    settle = llm.engine._settle

    def note(kind: type, method: str, name: str) -> None:
        original = getattr(kind, method)

        def noted(self: Any, *given: Any) -> Any:
            plan = self.plan if isinstance(self, Flight) else self._plan
            steps.append((name, tuple(plan)))
            return original(self, *given)

        monkeypatch.setattr(kind, method, noted)

    def note_settling(work: Work, outcome: Outcome, logits: Any) -> Any:
        steps.append(("guided" if work.request.guide is not None else "free", work))
        return settle(work, outcome, logits)

    note(RecordedRound, "forward", "forward")
    note(RecordedRound, "choose", "choose")
    note(Flight, "wait", "wait")
    monkeypatch.setattr(llm.engine, "_settle", note_settling)
    return steps


@pytest.fixture(scope="module")
def plain() -> Iterator[dict[tuple[str, str], list[int]]]:
    """What everybody says without a drafter, alone."""
    with LLM(None, None, enforce_eager=True, max_model_len=128, device="cpu") as llm:
        yield {
            (kind, prompt): llm.generate(prompt, params)[0].outputs[0].token_ids
            for kind, params in KINDS.items()
            for prompt in PROMPTS
        }


@pytest.mark.parametrize("drafter", [None, DRAFTER, "auto"])
def test_the_next_pass_begins_before_the_grammar_is_asked(
    drafter: Any, plain: dict[tuple[str, str], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every round is a recorded one, with guided requests and without, and hardly any waits for the one before."""
    with LLM(None, drafter, max_num_seqs=8, max_model_len=128, device="cpu") as llm:
        kinds = ["words", "free", "form, filtered", "words, penalised", "free, penalised", "object"]
        seen = Seen(llm, monkeypatch)
        asked = [llm.requests_for(PROMPTS[0], KINDS[kind], number)[0] for number, kind in enumerate(kinds)]
        for request in asked:
            llm.engine.add(request)
        while llm.engine.has_work:
            llm.engine.step()
        rounds = [plan for event, plan in seen.events if event == "forward"]
        assert llm.engine.num_recorded_rounds == len(rounds)
    assert [request.outputs for request in asked] == [plain[kind, PROMPTS[0]] for kind in kinds]
    assert seen.num_eager == 0
    guided = [plan for plan in rounds if any(work.request.guide is not None for work in plan)]
    assert seen.num_ahead() >= len(guided) - 2 > 10
    assert any(outcome.forced for _, outcome in seen.outcomes) is (drafter is not None)


@pytest.mark.parametrize("drafter", [None, DRAFTER])
def test_the_device_is_never_kept_waiting(drafter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is guided, the pass of a round is launched before the host waits for the round before. The rest of it
    follows as soon as grammars know what was said: whatever else the outcome brings can wait."""
    with LLM(None, drafter, max_num_seqs=8, max_model_len=128, device="cpu") as llm:
        kinds = ["free", "words", "free, sampled", "form", "free", "object"]
        asked = [llm.requests_for(PROMPTS[0], KINDS[kind], number)[0] for number, kind in enumerate(kinds)]
        for request in asked:
            llm.engine.add(request)
        while not all(request.num_outputs > 1 for request in asked):
            llm.engine.step()
        steps = steps_of(llm, monkeypatch)
        while not any(request.finished for request in asked):
            llm.engine.step()
    names = [name for name, _ in steps]
    rounds = [plan for name, plan in steps if name == "forward"]
    assert len(rounds) > 5
    for number, (before, after) in enumerate(pairwise(rounds[:-2])):
        waited, chosen = steps.index(("wait", before)), steps.index(("choose", after))
        assert steps.index(("forward", after)) < waited < chosen, f"round {number}"
        assert names[waited + 1 : chosen] == ["guided"] * 3, f"round {number}"
        end = names.index("forward", chosen)
        assert names[chosen + 1 : end] == ["free"] * 3, f"round {number}"
        assert names[end : end + 2] == ["forward", "wait"], f"round {number}"


def test_filters_that_nobody_asks_for_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """They look at every row of a round, guided or not."""
    with LLM(None, DRAFTER, max_num_seqs=8, max_model_len=128, device="cpu") as llm:
        replayed: list[GraphKey] = []
        replay = Graphs.replay

        def note(graphs: Graphs, key: GraphKey) -> Any:
            replayed.append(key)
            return replay(graphs, key)

        monkeypatch.setattr(Graphs, "replay", note)
        llm.generate(PROMPTS[:3], [KINDS["free"], KINDS["words, sampled"], KINDS["form"]])
        chosen = {key.flags for key in replayed if key.part is Part.CHOOSE}
        assert MASKED in chosen
        assert not any(flags.filtered or flags.adjusted for flags in chosen)
        replayed.clear()
        llm.generate(PROMPTS[:2], [KINDS["free"], KINDS["form, filtered"]])
        assert any(key.flags.filtered and key.flags.masked for key in replayed if key.part is Part.CHOOSE)


def test_whoever_comes_and_goes(
    plain: dict[tuple[str, str], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Guided or not, greedy or sampled, with prompts in small parts; and some give up."""
    counts = {"accepted": 0, "rejected": 0, "forced": 0, "forced and accepted": 0, "given up": 0}
    options: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 40, "page_size": 4, "max_model_len": 128}
    with LLM(None, DRAFTER, device="cpu", **options) as llm:
        seen, engine = Seen(llm, monkeypatch), llm.engine

        @settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
        @given(
            comers=st.lists(
                st.tuples(st.sampled_from(sorted(KINDS)), st.sampled_from(PROMPTS), st.integers(0, 6), st.booleans()),
                min_size=3,
                max_size=9,
            ),
            source=st.randoms(use_true_random=False),
        )
        def run(comers: list[tuple[str, str, int, bool]], source: random.Random) -> None:
            asked, left = [], []
            for number, (kind, prompt, pause, leaves) in enumerate(comers):
                (request,) = llm.requests_for(prompt, KINDS[kind], number)
                engine.add(request)
                asked.append((request, plain[kind, prompt]))
                for _ in range(pause):
                    engine.step()
                if leaves:
                    left.append(source.choice(asked)[0])
                    engine.abort(left[-1])
            while engine.has_work:
                engine.step()
            for request, expected in asked:
                assert request.outputs == (expected[: request.num_outputs] if request in left else expected)
            engine.step()
            assert engine.scheduler.pool.num_free == engine.scheduler.pool.capacity
            counts["given up"] += len(left)

        run()
        latest: dict[Request, Outcome] = {}
        for work, outcome in seen.outcomes:
            accepted, before = max(len(outcome.tokens) - 1, 0), latest.get(work.request)
            if work.request.guide is not None and outcome.num_judged:
                counts["accepted"] += accepted
                counts["rejected"] += outcome.num_judged - accepted
                counts["forced"] += outcome.forced
                counts["forced and accepted"] += accepted if before is not None and before.forced else 0
            latest[work.request] = outcome
        assert min(counts.values()) > 5, counts
        assert not any(outcome.forced for work, outcome in seen.outcomes if work.request.guide is None)
        assert seen.num_eager == 0
        assert seen.num_ahead() > 50


def test_logprobs_are_the_targets_own() -> None:
    """Masks are written over the logits; what was asked about them is kept before."""
    params = [replace(KINDS[kind], logprobs=0) for kind in ("words, sampled", "free", "form")]
    with LLM(None, DRAFTER, max_num_seqs=4, max_model_len=128, device="cpu") as llm:
        outputs = llm.generate([PROMPTS[2]] * len(params), params)
        assert llm.engine.num_recorded_rounds > 0
        for output in outputs:
            answer = output.outputs[0]
            (scored,) = llm.score([output.prompt_token_ids + answer.token_ids], 0)
            assert scored.prompt_logprobs is not None
            assert answer.logprobs is not None
            own = scored.prompt_logprobs[len(output.prompt_token_ids) :]
            for token, said, asked in zip(answer.token_ids, answer.logprobs, own, strict=True):
                assert asked is not None
                assert said[token].logprob == pytest.approx(asked[token].logprob, abs=1e-4)


def test_a_request_that_ends_in_the_round_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its part of the round under way is nobody's: no mask, no token, no error; a newcomer gets its slot."""
    with LLM(None, DRAFTER, max_num_seqs=2, max_model_len=128, device="cpu") as llm:
        short = replace(ANSWER, guided=Guided(choice=["no", "yes"]))
        found = [output.outputs[0].text for output in llm.generate(["So?"] * 7, short)]
        assert set(found) <= {"no", "yes"}
        assert len(found) == 7
        assert llm.engine.scheduler.pool.num_free == llm.engine.scheduler.pool.capacity


def test_nothing_is_recorded_after_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is asked of sampling, and of grammars."""
    with LLM(None, {**DRAFTER, "num_speculative_tokens": 2}, max_num_seqs=3, max_model_len=96, device="cpu") as llm:
        llm.warm_up()
        recorded = llm.engine.num_recordings
        assert recorded > 0
        seen = Seen(llm, monkeypatch)
        kinds = list(KINDS.values())
        kinds += [replace(each, num_speculative_tokens=0) for each in kinds]
        outputs = llm.generate([PROMPTS[number % 4] for number in range(len(kinds))], kinds)
        assert all(output.outputs[0].finish_reason in ("stop", "length") for output in outputs)
        assert llm.engine.num_recordings == recorded
        assert seen.num_eager == 0


def drafts_of(request: Request) -> list[list[int]]:
    return [entry["draft"] for entry in request.trace]


def test_guided_requests_join_rounds_under_way() -> None:
    """Whose masks are computed before it is known how many drafts the others have; log-probabilities of a prompt are
    found among rows whose number is known to the device alone."""
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, trace=True)
    guided = replace(params, guided=Guided(regex="(yes|no|maybe)( and (yes|no|maybe)){6}"), ignore_eos=False)
    scored = replace(params, max_tokens=4, prompt_logprobs=0)
    asked = [("Once upon a time", params), ("The sun is", params), ("One day a boy", params), ("Is it so?", guided),
             ("Was it so?", guided), ("A cat sat on the mat", scored)]  # fmt: skip
    with LLM(None, None, enforce_eager=True, device="cpu") as llm:
        plain = [llm.generate(text, each)[0] for text, each in asked]
    with LLM(None, {"method": "ngram", "prompt_lookup_min": 1}, max_num_seqs=6, device="cpu") as llm:
        requests = [llm.requests_for(text, each, number)[0] for number, (text, each) in enumerate(asked)]
        engine = llm.engine
        for request in requests[:3]:
            engine.add(request)
        for request in requests[3:]:
            for _ in range(4):
                engine.step()
            engine.add(request)
        while engine.has_work:
            engine.step()
        assert engine.num_recorded_rounds > 0
        assert len({drafted for request in requests for drafted in map(len, drafts_of(request))}) > 2
    assert [request.outputs for request in requests] == [output.outputs[0].token_ids for output in plain]
    found, expected = requests[-1].prompt_logprobs, plain[-1].prompt_logprobs
    assert expected is not None
    assert [row and {token: one.logprob for token, one in row.items()} for row in found] == [
        row and {token: one.logprob for token, one in row.items()} for row in expected
    ]
