"""Benchmarks: sides that take turns, peers on the same weights, and numbers that mean what they say."""

from __future__ import annotations

import gc
import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
import transformers
import typer
from rich.console import Console
from typer.testing import CliRunner

from outrider import LLM, SamplingParams, measure
from outrider.bench import (
    peer_llama_cpp,  # noqa: F401  (registers itself)
    random_pair,
    random_peers,
)
from outrider.bench.commands import bench_app
from outrider.bench.interleave import Record, Spread, interleave, memory_bandwidth, num_equal, paired_ratio
from outrider.bench.peer_transformers import Compiled, Continuous, Transformers, build_transformers, steady_rate
from outrider.bench.peers import PeerOptions, open_peers, peers
from outrider.bench.prompts import (
    WORKLOADS,
    PromptText,
    PromptVocabulary,
    random_prompts,
    read_prompts,
    workload,
)
from outrider.bench.sides import OutriderSide, Timing, bytes_read
from outrider.checkpoints.checkpoint import open_checkpoint
from outrider.console import print_json
from outrider.measure import Question, compare, forget_requests, run
from outrider.sampling_params import Speculation

PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 8], [11, 12, 13, 14, 15]]


def options(path: Path) -> PeerOptions:
    return PeerOptions(path, torch.float32, torch.device("cpu"), max_len=64, threads=1)


# prompts and options


def test_prompts_are_read_line_by_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "Hello"}\n\n{"turns": ["One", "Two"], "id": 4}\n{"prompt_token_ids": [1, 2]}\n')
    assert read_prompts(file) == [PromptText("Hello"), PromptText("One", is_chat=True), PromptText(ids=(1, 2))]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "line 1"),
        ("[1]", "not a JSON object"),
        ('{"text": "Hello"}', 'needs "prompt"'),
        ('{"prompt": 7}', 'needs "prompt"'),
        ('{"turns": []}', 'needs "prompt"'),
        ('{"prompt_token_ids": [1, "2"]}', "whole numbers"),
        ("", "holds no prompt"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, line: str, reason: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(ValueError, match=reason):
        read_prompts(file)


def test_a_model_without_a_tokenizer_gets_random_ids(target_path: Callable[..., Path]) -> None:
    vocabulary = PromptVocabulary.of(target_path())
    assert vocabulary.size == tiny.VOCAB
    for name in WORKLOADS:
        prompts = workload(name, vocabulary)
        assert len(prompts) == len(WORKLOADS[name])
        assert all(0 <= token < tiny.VOCAB for ids in vocabulary.encode_all(prompts) for token in ids)
    assert random_prompts(100, 3) == random_prompts(100, 3)
    with pytest.raises(ValueError, match="no tokenizer"):
        vocabulary.encode(PromptText("Hello"))
    with pytest.raises(ValueError, match="known: chat, repetition"):
        workload("poetry", vocabulary)


# taking turns


class FakeSide:
    """Answers at once, and claims what it is told to."""

    def __init__(self, name: str, seconds: list[float], log: list[str]) -> None:
        self.name, self.pass_bytes = name, 8_000_000
        self._seconds, self._log = iter([0.0, *seconds]), log

    def start_run(self) -> None:
        pass

    def answer(self, prompts: Any, max_tokens: int) -> Timing:
        self._log.append(f"{self.name}{max_tokens}")
        tokens = [[len(ids)] * max_tokens for ids in prompts]
        return Timing(next(self._seconds), 0.5, max_tokens, tokens, Speculation(rounds=4, drafted=8, accepted=4))

    def close(self) -> None:
        pass


def test_no_run_is_judged_by_one_look_through_the_heap() -> None:
    frozen: list[int] = []

    class Watching(FakeSide):
        def answer(self, prompts: Any, max_tokens: int) -> Timing:
            frozen.append(gc.get_freeze_count())
            return super().answer(prompts, max_tokens)

    interleave([Watching("a", [1.0, 1.0], [])], [[[1]]], 11, 2)
    assert len(frozen) == 3
    assert min(frozen) > 10_000 > gc.get_freeze_count()


def test_sides_take_turns_after_a_warm_up() -> None:
    log: list[str] = []
    told: list[tuple[str, int, int]] = []
    sides = [FakeSide("a", [1.5, 2.5, 1.5], log), FakeSide("b", [3.0, 2.5, 6.0], log)]
    a, b = interleave(sides, [[[1, 2], [3]]], 11, 3, lambda *args: told.append(args))
    assert log == ["a8", "b8", "a11", "b11", "b11", "a11", "a11", "b11"]
    assert told[0] == ("warming up a", 0, 8)
    assert told[-1] == ("done", 8, 8)
    assert a.tokens_per_second.values == (22 / 1.5, 22 / 2.5, 22 / 1.5)
    assert a.first_token_ms.median == 500
    assert a.token_ms.median == pytest.approx(100)  # (1.5 - 0.5) s for ten more tokens
    assert a.step_ms.median == pytest.approx(100)
    assert a.gigabytes_per_second.median == pytest.approx(8e6 / 0.1 / 1e9)
    assert paired_ratio(a, b).values == pytest.approx((2.0, 1.0, 4.0))
    assert paired_ratio(a, b).median == pytest.approx(2.0)
    assert a.speculation is not None
    assert a.speculation.accept_length == 2.0
    assert num_equal(a, b) == 2
    assert a.is_steady


def test_an_unsteady_side_is_noticed() -> None:
    runs = [[Timing(1.0, 0.1, 3, [[1, 2, 3]])], [Timing(1.0, 0.1, 3, [[1, 2, 4]])]]
    assert not Record("side", 1, runs).is_steady


def test_a_spread_and_a_roof() -> None:
    assert Spread((3.0, 1.0, 2.0)).to_dict() == {"median": 2.0, "min": 1.0, "max": 3.0, "runs": [3.0, 1.0, 2.0]}
    assert memory_bandwidth(torch.device("cpu")) > 0.01


# our own side


@pytest.fixture
def plain(target_path: Callable[..., Path]) -> Iterator[OutriderSide]:
    side = OutriderSide("plain", LLM(target_path(), enable_prefix_caching=False, max_model_len=64))
    yield side
    side.close()


def test_our_side_counts_steps_and_tokens(plain: OutriderSide) -> None:
    timing = plain.answer(PROMPTS, 6)
    assert [len(answer) for answer in timing.tokens] == [6, 6, 6]
    assert timing.steps == 6
    assert 0 < timing.first_token < timing.seconds
    assert timing.speculation is None


def test_an_embedding_of_its_own_is_not_read_in_a_pass(target_path: Callable[..., Path]) -> None:
    for family, untied in (("llama", 1), ("smollm2", 0)):
        with LLM(target_path(family), max_model_len=64) as llm:
            everything = sum(parameter.numel() for parameter in llm.target.parameters()) * 4
            assert bytes_read(llm.target) == everything - untied * tiny.VOCAB * 64 * 4


# peers


@pytest.mark.parametrize("way", [Transformers, Compiled, Continuous])
def test_transformers_gives_our_tokens(
    way: type[Transformers], plain: OutriderSide, target_path: Callable[..., Path]
) -> None:
    peer = way.open(options(target_path()))
    ours = plain.answer(PROMPTS, 12)
    for _ in range(2):  # what is kept from call to call must not show
        theirs = peer.answer(PROMPTS, 12)
        assert theirs.tokens == ours.tokens
        assert theirs.steps == 12
        assert 0 < theirs.first_token < theirs.seconds
        assert theirs.steady is not None
        assert theirs.steady > 0
    assert peer.pass_bytes == plain.pass_bytes
    peer.close()


def test_steady_rate_counts_while_all_decode() -> None:
    stamps = [[1.0, 2.0, 3.0, 4.0, 5.0], [3.0, 3.5, 4.0, 5.0, 6.0]]  # from 3 to 5: two and three tokens
    assert steady_rate(stamps) == pytest.approx(5 / 2)
    assert steady_rate([[1.0, 2.0], [3.0, 4.0]]) is None
    assert steady_rate([[1.0], []]) is None


@pytest.mark.parametrize("family", ["smollm2", "llama3", "qwen3"])
def test_transformers_is_built_from_our_own_reading(family: str, target_path: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(target_path(family))
    built = build_transformers(transformers, checkpoint, torch.float32).eval()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(target_path(family)).eval()
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(built(ids).logits, loaded(ids).logits)
    checkpoint.close()


def test_llama3_factors_of_a_gguf_file_are_applied(target_path: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(target_path())
    straight = build_transformers(transformers, checkpoint, torch.float32)
    factors = [1.0 + place for place in range(8)]
    checkpoint.config["rope_scaling"] = {"rope_type": "llama3_factors", "factors": factors}
    scaled = build_transformers(transformers, checkpoint, torch.float32)
    expected = straight.model.rotary_emb.inv_freq / torch.tensor(factors)
    torch.testing.assert_close(scaled.model.rotary_emb.inv_freq, expected)
    checkpoint.close()


def test_missing_peers_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    opened, notes = open_peers(["llama-cpp-python"], options(tmp_path / "model.gguf"))
    assert opened == []
    assert "pip install llama-cpp-python" in notes[0]
    (note,) = open_peers(["llama.cpp"], options(tmp_path))[1]
    assert ".gguf files only" in note
    with pytest.raises(ValueError, match="pip install transformers"):
        open_peers(["transformers"], options(tmp_path))


def test_llama_cpp_answers_prompt_by_prompt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Llama:
        def __init__(self, path: str, **settings: Any) -> None:
            assert settings["n_threads"] == 1
            assert settings["n_gpu_layers"] == 0

        def reset(self) -> None: ...

        def close(self) -> None: ...

        def generate(self, tokens: list[int], **settings: Any) -> Iterator[int]:
            assert settings["temp"] == 0
            while True:
                tokens.append(tokens[-1] + 1)
                yield tokens[-1]

    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(Llama=Llama))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"x" * 1000)
    (peer,), notes = open_peers(["llama-cpp-python"], options(file))
    assert notes == []
    assert peer.pass_bytes == 1000
    timing = peer.answer([[1, 2], [7]], 3)
    assert timing.tokens == [[3, 4, 5], [8, 9, 10]]
    assert timing.steps == 6
    peer.close()


# the commands


def call(*arguments: Any) -> Any:
    app = typer.Typer()
    app.add_typer(bench_app, name="bench")
    return CliRunner().invoke(app, ["bench", *(str(argument) for argument in arguments)])


def test_latency_prints_one_json_object(target_path: Callable[..., Path]) -> None:
    result = call(
        *("latency", "--model", target_path(), "--draft", target_path(num_hidden_layers=3), "--json"),
        *("--max-tokens", 10, "--num-runs", 2, "--num-prompts", 2),
    )
    data = json.loads(result.stdout)
    plain, speculative = data["sides"]
    assert data["benchmark"] == "bench latency"
    assert data["drafter"] == "draft_model"
    assert (data["batch_size"], data["num_prompts"], data["num_runs"]) == (1, 2, 2)
    assert len(plain["tokens_per_second"]["runs"]) == 2
    assert plain["accept_length"] is None
    assert speculative["accept_length"] >= 1
    assert speculative["answers_equal_to_plain"] == 2
    assert list(data["ratios"]) == ["outrider speculative / outrider plain"]


def test_throughput_ends_with_a_json_line(target_path: Callable[..., Path]) -> None:
    threads = torch.get_num_threads()
    result = call(
        *("throughput", "--model", target_path(), "--against", "transformers", "--against", "llama.cpp"),
        *("--batch-size", 3, "--max-tokens", 6, "--num-runs", 1, "--threads", threads, "--workload", "repetition"),
    )
    *card, last = result.stdout.strip().splitlines()
    data = json.loads(last)
    assert [side["name"] for side in data["sides"]] == ["outrider plain", "transformers"]
    assert data["sides"][1]["answers_equal_to_plain"] == 3
    assert data["drafter"] is None
    assert data["threads"] == threads
    text = "\n".join(card)
    assert "as fast as transformers" in text
    assert "identical answers, transformers and outrider plain: 3 of 3" in text
    assert "llama.cpp is left out" in text


def test_one_prompt_and_a_file_are_one_too_many(target_path: Callable[..., Path], tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt_token_ids": [1, 2]}\n')
    result = call("latency", "--model", target_path(), "--prompt", "Hello", "--prompts", file)
    assert isinstance(result.exception, ValueError)
    result = call("latency", "--model", target_path(), "--prompts", file, "--against", "nobody")
    assert "unknown peer" in str(result.exception)


# drafters that remember


def test_no_run_is_drafted_from_the_answers_of_the_run_before(target_path: Callable[..., Path]) -> None:
    """suffix learns from every request that ends, and every run asks the same."""
    settings = {"method": "suffix", "num_speculative_tokens": 4, "adaptive": False}
    with LLM(target_path(), settings, enable_prefix_caching=False, max_model_len=64) as llm:
        side = OutriderSide("suffix", llm)
        (record,) = interleave([side], [[PROMPTS[0]], [PROMPTS[2]]], 24, 3)
        runs = [[timing.speculation for timing in run] for run in record.runs]
        assert runs[0] == runs[1] == runs[2]
        told = side.answer([PROMPTS[0]], 24).speculation
    first = runs[0][0]
    assert told is not None
    assert first is not None
    assert told.accept_length > first.accept_length + 0.5, "it knows the answer by now"


def test_a_comparison_is_not_drafted_from_its_own_answers(target_path: Callable[..., Path]) -> None:
    settings = {"method": "suffix", "num_speculative_tokens": 4, "adaptive": False}
    question = Question(PROMPTS[0], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    with LLM(target_path(), settings, enable_prefix_caching=False) as drafted, LLM(target_path(), None) as plain:
        first = run(drafted, question)
        found = compare(drafted, plain, question, first)
        assert found.drafted.completion.speculation == first.completion.speculation
        assert run(drafted, question).completion.speculation != first.completion.speculation
        assert not forget_requests(plain)


@pytest.mark.parametrize(("seconds", "count"), [(0.01, 15), (0.25, 6), (40.0, 3)])
def test_short_answers_are_timed_more_often(seconds: float, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    completion: Any = SimpleNamespace(token_ids=[1, 2])
    answer = measure.Run(
        completion, seconds=seconds, ttft=0.0, num_prompt_tokens=1, num_cached_tokens=0, interrupted=False
    )
    asked: list[str] = []
    monkeypatch.setattr(measure, "forget_requests", lambda llm: False)
    monkeypatch.setattr(measure, "run_to_end", lambda llm, question: asked.append(llm) or answer)
    sides: Any = ("drafted", "plain")
    assert compare(*sides, Question("Hi", SamplingParams()), answer).difference is None
    assert asked == ["plain", *["drafted", "plain"] * count]


def test_the_card_says_what_a_drafter_was_made_to_forget(target_path: Callable[..., Path], tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt_token_ids": [5, 6, 7, 5, 6]}\n')
    options = ("latency", "--model", target_path(), "--prompts", file, "-n", "4", "--num-runs", "1", "--json")
    notes = json.loads(call(*options, "--draft", "suffix").stdout)["notes"]
    assert notes == ["suffix forgets all earlier requests before every run: none is drafted from its own answer"]
    notes = json.loads(call(*options, "--draft", "suffix", "--num-prompts", "3").stdout)["notes"]
    assert "but 2 of 3 prompts come again" in notes[1]
    assert json.loads(call(*options, "--draft", "ngram").stdout)["notes"] == []


def test_a_terminal_shows_json_only_where_it_was_asked_for() -> None:
    def shown(*, terminal: bool, asked: bool) -> str:
        written = io.StringIO()
        print_json(Console(file=written, force_terminal=terminal), {"a": 1}, asked=asked)
        return written.getvalue()

    assert shown(terminal=True, asked=False) == ""
    assert shown(terminal=True, asked=True) == shown(terminal=False, asked=False) == '{"a": 1}\n'


def test_help_names_all_peers_shapes_and_methods() -> None:
    """The help is written without importing what registers them."""
    said = " ".join(CliRunner().invoke(bench_app, ["latency", "--help"]).stdout.split()).replace("- ", "-")
    assert all(name in said for name in peers)
    said = " ".join(CliRunner().invoke(bench_app, ["round", "--help"]).stdout.split()).replace("- ", "-")
    assert all(name in said for name in (*random_pair.SHAPES, *random_pair.METHODS, *random_peers.PEERS))
