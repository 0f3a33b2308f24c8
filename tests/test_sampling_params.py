"""SamplingParams as vLLM's users have them: mutable, with None, in vLLM's names."""

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest

from outrider import LLM, Guided, SamplingParams, StructuredOutputsParams
from outrider.sampling_params import BeamSearchParams, GuidedDecodingParams, RequestOutputKind


def test_none_is_the_default() -> None:
    names = ("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "min_tokens")
    lists = ("stop", "stop_token_ids", "bad_words", "logit_bias", "allowed_token_ids", "structured_outputs")
    flags = ("repetition_penalty", "ignore_eos", "detokenize", "skip_special_tokens", "output_kind", "seed", "logprobs")
    given: dict[str, Any] = dict.fromkeys((*names, *lists, *flags))
    assert SamplingParams(**given) == SamplingParams() == SamplingParams.from_optional(**given)
    assert SamplingParams(max_tokens=None).max_tokens is None, "until the context is full"
    assert SamplingParams().stop == SamplingParams().stop_token_ids == SamplingParams().bad_words == []


def test_vllms_ways_to_say_it() -> None:
    params = SamplingParams(seed=-1, logprobs=True, logit_bias={"7": 1.5}, stop="END")  # type: ignore[dict-item]
    assert (params.seed, params.logprobs, params.logit_bias, params.stop) == (None, 1, {7: 1.5}, ["END"])
    assert SamplingParams(best_of=1, use_beam_search=False, length_penalty=2.0) == SamplingParams()  # type: ignore[call-arg]
    old = SamplingParams(guided_decoding=GuidedDecodingParams(regex="a+"))  # type: ignore[call-arg]
    assert old.structured_outputs == StructuredOutputsParams(regex="a+")
    assert SamplingParams(structured_outputs={"regex": "a+"}) == old  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"best_of=3: .*; temprature: nobody knows it .did you mean temperature"):
        SamplingParams(best_of=3, temprature=1)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="no beam search"):
        BeamSearchParams(beam_width=4, max_tokens=5)


def test_they_can_be_changed_and_are_checked_when_used() -> None:
    params = SamplingParams(temperature=0, max_tokens=3, stop=["x"])
    params.stop.append("y")  # type: ignore[union-attr]
    other = params.clone()
    params.max_tokens = 4
    params.stop.append("z")  # type: ignore[union-attr]
    assert (other.max_tokens, other.stop) == (3, ["x", "y"])
    assert copy.deepcopy(other) == pickle.loads(pickle.dumps(other)) == replace(other) == other
    params.temperature = -1.0
    with pytest.raises(ValueError, match="temperature must be between"):
        params.clone()


@pytest.fixture(scope="module")
def llm() -> Any:
    with LLM(max_model_len=256, exact=True) as made:
        yield made


def test_a_request_goes_by_what_they_say_when_it_is_made(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    stream = llm.stream("Once upon a time", params)
    next(stream)
    params.max_tokens = 2
    assert len(list(stream)[-1].outputs[0].token_ids) == 8
    assert len(llm.generate("Once upon a time", params)[0].outputs[0].token_ids) == 2
    params.top_p = 7.0
    with pytest.raises(ValueError, match="top_p must be between"):
        llm.generate("Once upon a time", params)


@pytest.mark.parametrize(
    ("structured", "guided"),
    [
        ({"regex": "(ab){2,4}"}, {"regex": "(ab){2,4}"}),
        ({"choice": ["yes", "no"]}, {"choice": ["yes", "no"]}),
        ({"grammar": 'root ::= "x" | "y"'}, {"grammar": 'root ::= "x" | "y"'}),
        ({"json_object": True}, {"json_object": True}),
        ({"json": '{"type": "integer"}', "disable_additional_properties": True}, {"json_schema": {"type": "integer"}}),
        (
            {"structural_tag": '{"type": "structural_tag", "format": {"type": "const_string", "value": "ok"}}'},
            {"structural_tag": {"type": "const_string", "value": "ok"}},
        ),
    ],
)
def test_structured_outputs(llm: LLM, structured: dict[str, Any], guided: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0, max_tokens=24)
    params.structured_outputs = StructuredOutputsParams(**structured)
    said = llm.generate("Say", params)[0].outputs[0].text
    ours = SamplingParams(temperature=0, max_tokens=24, guided=Guided(**guided))
    assert said == llm.generate("Say", ours)[0].outputs[0].text
    assert said != llm.generate("Say", SamplingParams(temperature=0, max_tokens=24))[0].outputs[0].text


def test_structured_outputs_that_make_no_sense() -> None:
    for given, told in (
        ({}, "exactly one of"),
        ({"regex": "a", "choice": ["b"]}, "exactly one of"),
        ({"regex": "a", "whitespace_pattern": " *"}, "max_whitespace"),
        ({"structural_tag": "{"}, "not valid JSON"),
        ({"regexp": "a"}, "did you mean regex"),
    ):
        with pytest.raises(ValueError, match=told):
            StructuredOutputsParams(**given)  # type: ignore[arg-type]
    both = {"guided": Guided(regex="a"), "structured_outputs": StructuredOutputsParams(regex="a")}
    with pytest.raises(ValueError, match="twice"):
        SamplingParams(**both)  # type: ignore[arg-type]


def test_output_kinds_of_a_stream(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=1, n=2)
    (whole,) = llm.generate("The little dog", params)
    deltas = list(llm.stream("The little dog", replace(params, output_kind=RequestOutputKind.DELTA)))
    assert len(deltas) > 1
    for index in (0, 1):
        parts = [each for delta in deltas for each in delta.outputs if each.index == index]
        assert "".join(each.text for each in parts) == whole.outputs[index].text
        assert [token for each in parts for token in each.token_ids] == whole.outputs[index].token_ids
        assert sum(len(each.logprobs or []) for each in parts) == 20
    (final,) = llm.stream("The little dog", replace(params, output_kind=RequestOutputKind.FINAL_ONLY))
    assert final.outputs[0].text == whole.outputs[0].text


def test_without_text(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, detokenize=False)
    (silent,) = llm.generate("The little dog", params)[0].outputs
    (spoken,) = llm.generate("The little dog", replace(params, detokenize=True))[0].outputs
    assert silent.token_ids == spoken.token_ids
    assert (silent.text, bool(spoken.text)) == ("", True)
