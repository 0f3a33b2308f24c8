"""A server whose drafter learns: only from those who allow it, and only while nobody waits."""

from dataclasses import replace
from pathlib import Path

from running import Serve, wait_for

from outrider import LLM
from outrider.pair import AUTO, named_pair
from outrider.server.learning import learner_of

BODY = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 16, "temperature": 0}


def test_it_learns_from_those_who_allow_it(serve: Serve, tmp_path: Path) -> None:
    target, speculative = named_pair(None, AUTO)
    assert speculative is not None
    with LLM(target, replace(speculative, adaptive=False), max_num_seqs=2, max_model_len=256, threads=1) as llm:
        learner = learner_of(llm, str(tmp_path))
        with serve(other=llm, learner=learner) as running:
            answers = [running.post("/v1/chat/completions", BODY).json()]
            assert learner.report() == {"version": 0, "heard": 0, "steps": 0}
            allowed = {**BODY, "allow_learning": True}
            answers += [running.post("/v1/chat/completions", allowed).json() for _ in range(2)]
            wait_for(lambda: learner.report()["steps"] == 1)  # half a step a text
            assert learner.report()["heard"] == 2
        assert len({answer["choices"][0]["message"]["content"] for answer in answers}) == 1
        assert (tmp_path / "0" / "model.safetensors").is_file()
