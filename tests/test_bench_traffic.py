"""`outrider bench traffic`: load that comes as it is said to, figures that add up, and levels that are marked."""

from __future__ import annotations

import gc
import io
import json
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tiny
from rich.console import Console
from test_bench_round import SHAPE
from typer.testing import CliRunner

from outrider import LLM, SamplingParams
from outrider.bench.load.serve_client import Answered, Asking
from outrider.bench.load.serve_load import Load, LoadOutcome
from outrider.bench.load.serve_metrics import DraftingFigures
from outrider.bench.load.traffic import Level, LevelRuns, TrafficPlan, measure_levels, output_rate
from outrider.bench.load.traffic_opening import engine_sides, random_sides, server_arguments
from outrider.bench.load.traffic_plot import COLOURS
from outrider.bench.load.traffic_prompts import traffic_prompts
from outrider.bench.load.traffic_report import TrafficSetting, show_card, to_dict
from outrider.bench.load.traffic_sides import Clients, EngineSide
from outrider.bench.prompts import PromptText, PromptVocabulary
from outrider.cli import app
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.engine.governor import Governor
from outrider.engine.policy import FixedDepth
from outrider.options import EngineOptions
from outrider.pair import DEFAULT_DIRECTORY

ASKING = Asking("", False, 6, 0.0, 0, ignore_eos=True)
SETTING = TrafficSetting("tiny", "ngram", "real", None, "engine", "float32", "cpu", 1)
PLAN = TrafficPlan([Level(2)], prompt_len=8, answer_len=6, think_seconds=0.0, num_runs=2, num_prompts=4)
QUICK = ("--num-runs", "2", "--num-prompts", "5", "--prompt-len", "9", "--answer-len", "6", "--think", "0.001")


def silent(line: str) -> None:
    pass


def call(*arguments: object) -> tuple[dict[str, Any], str]:
    """The JSON line, and everything that was said."""
    result = CliRunner().invoke(app, ["bench", "traffic", "--device", "cpu", "--threads", "1", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.strip().splitlines()[-1]), result.stdout + result.stderr


@pytest.fixture
def side(target_path: Callable[..., Path]) -> Any:
    with LLM(target_path(), None, enable_prefix_caching=False, max_model_len=64, threads=1) as llm:

        def make(prompt: PromptText, params: SamplingParams) -> Any:
            return llm.requests_for({"prompt_token_ids": prompt.ids}, params, 0)[0]

        yield EngineSide("tiny", llm.engine, make, ASKING)


def most_at_once(answers: Sequence[Answered]) -> int:
    """Requests; one that is sent in the moment in which another ends comes after it."""
    ends = [(each.sent + each.seconds - 1e-6, -1) for each in answers]
    changes = [(each.sent, 1) for each in answers] + ends
    now = most = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


# how requests come


def test_clients_think_for_exponential_times_of_the_seed() -> None:
    load = Load(4000, 0, 8, None, 7, think_seconds=0.02)
    waits = load.thinking()
    mean = sum(waits) / len(waits)
    assert mean == pytest.approx(0.02, rel=0.1)
    assert sum((wait - mean) ** 2 for wait in waits) / len(waits) == pytest.approx(mean**2, rel=0.15)
    assert waits == load.thinking() != replace(load, seed=8).thinking()
    assert set(replace(load, think_seconds=0.0).thinking()) == {0.0}


def test_a_client_sends_again_only_after_its_last_request_has_ended() -> None:
    clients = Clients(Load(5, 0, 2, None, 0))
    assert [number for _, number in clients.take_due(0.0)] == [0, 1]
    assert clients.take_due(1e9) == []
    clients.send_next(3.0)
    assert clients.next_due == 3.0
    assert clients.take_due(2.9) == []
    assert clients.take_due(3.0) == [(3.0, 2)]
    thinking = Clients(Load(5, 0, 2, None, 0, think_seconds=1.0))
    assert [due for due, _ in thinking.take_due(1e9)] == sorted(
        Load(5, 0, 2, None, 0, think_seconds=1.0).thinking()[:2]
    )


def test_with_a_rate_requests_come_whether_or_not_others_have_ended() -> None:
    load = Load(5, 0, None, 10.0, 0)
    assert [due for due, _ in Clients(load).take_due(1e9)] == load.arrivals()


def test_whoever_begins_a_chat_goes_on_with_it() -> None:
    clients = Clients(Load(6, 0, 1, None, 0, num_turns=2))
    for number, last in enumerate([None, 0, 1, 2, 3, 4]):
        if last is not None:
            clients.send_next(float(number), last)
        assert clients.take_due(1e9) == [(float(number), number)]
    several = Clients(Load(6, 0, 2, None, 0, num_turns=3))
    assert [number for _, number in several.take_due(0.0)] == [0, 3]
    several.send_next(1.0, 3)
    several.send_next(2.0, 0)
    assert several.take_due(1e9) == [(1.0, 4), (2.0, 1)]
    load = Load(6, 0, None, 10.0, 0, num_turns=3)
    assert [due for due, _ in Clients(load).take_due(1e9)] == [load.arrivals()[0], load.arrivals()[3]]


def test_a_turn_begins_with_all_that_was_said_before(target_path: Callable[..., Path]) -> None:
    """Its pages are found, but not those of the same chat of an earlier run."""
    prompts = traffic_prompts(PromptVocabulary(None, tiny.VOCAB), 6, 8)
    with LLM(target_path(), None, max_model_len=64, page_size=4, threads=1) as llm:

        def make(prompt: PromptText, params: SamplingParams) -> Any:
            return llm.requests_for({"prompt_token_ids": prompt.ids}, params, 0)[0]

        side = EngineSide("chats", llm.engine, make, ASKING)
        for _ in range(2):
            answers = side.run(prompts, Load(6, 0, 2, None, 0, num_turns=3)).answers
            assert [each.num_prompt_tokens for each in answers] == [8, 22, 36] * 2
            assert [each.num_cached for each in answers] == [0, 12, 24] * 2  # of 13 and 27 that have rows


def test_requests_are_drawn_as_the_plan_says(side: EngineSide) -> None:
    asked: list[SamplingParams] = []

    def make(prompt: PromptText, params: SamplingParams) -> Any:
        asked.append(params)
        return side.make(prompt, params)

    prompts = traffic_prompts(PromptVocabulary(None, tiny.VOCAB), 3, 8)
    plan = replace(PLAN, temperature=0.7, top_p=0.6)
    EngineSide("drawn", side.engine, make, plan.asking()).run(prompts, Load(3, 0, 1, None, 0))
    assert [(params.temperature, params.top_p) for params in asked] == [(0.7, 0.6)] * 3


def test_requests_join_the_loop_of_the_engine(side: EngineSide) -> None:
    prompts = traffic_prompts(PromptVocabulary(None, tiny.VOCAB), 9, 8)
    for clients in (1, 3):
        outcome = side.run(prompts, Load(9, 0, clients, None, 0))
        assert [each.number for each in outcome.answers] == list(range(9))
        assert most_at_once(outcome.answers) == clients
        assert all(each.num_tokens == 6 and each.num_prompt_tokens == 8 for each in outcome.answers)
        assert all(0 < (each.first or 0) < each.seconds <= outcome.seconds + 1e-6 for each in outcome.answers)
        assert output_rate(outcome) == pytest.approx(9 * 6 / outcome.seconds)
    outcome = side.run(prompts, Load(9, 0, None, 1e6, 0))
    assert most_at_once(outcome.answers) == 9
    assert not side.engine.has_work


def test_time_begins_when_a_client_sends_and_not_when_the_engine_looks(side: EngineSide) -> None:
    """With a rate far beyond what it can do, a request that comes later waits for a step to end."""
    prompts = traffic_prompts(PromptVocabulary(None, tiny.VOCAB), 4, 8)
    load = Load(4, 0, None, 1e5, 3)
    answers = side.run(prompts, load).answers
    begin = answers[0].sent
    assert [each.sent - begin for each in answers] == pytest.approx(load.arrivals(), abs=1e-9)


def test_sides_take_turns_at_every_level() -> None:
    log: list[tuple[str, int, int]] = []
    frozen: list[int] = []

    class Told:
        def __init__(self, name: str) -> None:
            self.name = name

        def run(self, prompts: Sequence[PromptText], load: Load) -> LoadOutcome:
            log.append((self.name, load.num_prompts, load.seed))
            frozen.append(gc.get_freeze_count())
            answers = [Answered(n, 0.0, 0.1, 1.0, num_tokens=6) for n in range(load.num_prompts)]
            return LoadOutcome(answers, 1.0, ASKING, None)

    notes: list[str] = []
    found = measure_levels([Told("a"), Told("b")], [], PLAN, notes.append)
    assert log == [("a", 2, 2), ("b", 2, 2), ("a", 4, 0), ("b", 4, 0), ("b", 4, 1), ("a", 4, 1)]
    assert [len(runs) for runs in found[0].runs] == [2, 2]
    assert notes == ["2 clients: a 24 tokens/s, b 24 tokens/s"]
    log.clear()
    measure_levels([Told("a")], [], replace(PLAN, num_prompts=10, num_runs=1), silent)
    assert [each[:2] for each in log] == [("a", 5), ("a", 10)]  # half a run first, which is not counted
    assert min(frozen) > 10_000 > gc.get_freeze_count()  # the heap is not looked through in the middle of a run


def test_requests_that_fail_void_the_measurement() -> None:
    class Failing:
        name = "failing"

        def run(self, prompts: Sequence[PromptText], load: Load) -> LoadOutcome:
            return LoadOutcome([Answered(0, 0.0, error="HTTP 500")], 1.0, ASKING, None)

    with pytest.raises(ValueError, match=r"1 of 1 requests failed at 2 clients \(HTTP 500\)"):
        measure_levels([Failing()], [], PLAN, silent)


# prompts


def test_prompts_have_the_length_that_was_asked_for() -> None:
    vocabulary = PromptVocabulary.of(DEFAULT_DIRECTORY / "target")
    whole = vocabulary.encode(PromptText("x"))
    for length in (12, 64, 700):
        prompts = traffic_prompts(vocabulary, 4, length)
        assert {len(each.ids) for each in prompts} == {length}
        assert {each.ids[0] for each in prompts} == {whole[0]}  # the template around it is kept
        assert {each.ids[-2:] for each in prompts} == {tuple(whole[-2:])}
    assert len(set(traffic_prompts(vocabulary, 4, 64))) == 4
    bare = traffic_prompts(PromptVocabulary(None, 50), 3, 40)
    assert all(len(each.ids) == 40 and max(each.ids) < 50 for each in bare)


# engines


def test_two_engines_one_without_a_drafter(target_path: Callable[..., Path]) -> None:
    """And a drafter that learns from earlier requests knows nothing of the run before."""
    settings = SpeculativeConfig(method="suffix", num_speculative_tokens=4, force=True)
    config = EngineConfig(target_path(), settings, max_model_len=64, enable_prefix_caching=False, threads=1)
    prompts = [PromptText(ids=(5, 6, 7, 5, 6, 7, 5, 6)), PromptText(ids=(11, 12, 13, 14, 15))]
    with ExitStack() as opened:
        plain, drafted = engine_sides(config, replace(ASKING, max_tokens=24), opened, silent)
        load = Load(2, 0, 1, None, 0)
        assert plain.run(prompts, load).drafting is None
        first, second = (drafted.run(prompts, load).drafting for _ in range(2))
    assert first is not None
    assert first.num_drafts > 0
    assert first == second


@pytest.mark.parametrize(("force", "policy"), [(False, Governor), (True, FixedDepth)])
def test_random_weights_are_drafted_for_as_much_as_is_worth_it(force: bool, policy: type, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SHAPE))
    settings = SpeculativeConfig("eagle3", force=force, synthetic_acceptance_length=3.0)
    config = EngineConfig("shape", settings, device="cpu", max_model_len=128, max_num_seqs=4, threads=1)
    with ExitStack() as opened:
        _, drafted = random_sides(config, str(path), ASKING, opened, silent)
        assert isinstance(drafted, EngineSide)
        assert isinstance(drafted.engine.drafting.policy, policy)


# what is reported


def outcome(seconds: float, drafting: DraftingFigures | None = None) -> LoadOutcome:
    """A hundred requests of 11 tokens: the first after 1, 2, ... ms, the others in 10 ms each."""
    answers = [Answered(n, 0.0, (n + 1) / 1e3, (n + 1) / 1e3 + 0.1, num_tokens=11) for n in range(100)]
    return LoadOutcome(answers, seconds, ASKING, drafting)


def test_levels_where_speculative_is_under_plain_are_marked() -> None:
    drafting = DraftingFigures(40, 200, 60, (), "the engine")
    under = LevelRuns(Level(1), [[outcome(1.0)] * 3, [outcome(1 / 0.97, drafting)] * 3])
    noise = LevelRuns(Level(4), [[outcome(1.0)] * 3, [outcome(1 / 0.985, drafting)] * 3])
    plan = replace(PLAN, levels=[Level(1), Level(4)])
    report = to_dict(SETTING, plan, [under, noise])
    assert [level["is_under_plain"] for level in report["levels"]] == [True, False]
    assert report["levels_under_plain"] == ["1 client"]
    found = report["levels"][0]
    assert found["times_plain"] == pytest.approx(0.97, abs=1e-4)
    assert found["plain"]["tokens_per_second"]["median"] == 1100
    assert found["plain"]["ttft_ms"] == {"median": pytest.approx(50.5), "p99": pytest.approx(99.01)}
    assert found["plain"]["tpot_ms"] == {"median": pytest.approx(10), "p99": pytest.approx(10)}
    assert (found["speculative"]["accept_length"], found["plain"]["accept_length"]) == (2.5, None)
    said = card(report)
    assert said.count("UNDER") == 2
    assert "speculative is UNDER plain at 1 of 2 levels: 1 client" in said
    fine = to_dict(SETTING, replace(plan, levels=[Level(4)]), [noise])
    assert "speculative is never under plain" in card(fine)
    assert "UNDER" not in card(fine)


def card(report: dict[str, Any]) -> str:
    written = io.StringIO()
    show_card(Console(file=written, width=100), report)
    return written.getvalue()


def test_one_command_gives_a_card_a_picture_and_a_line_of_json(
    target_path: Callable[..., Path], tmp_path: Path
) -> None:
    from PIL import Image

    picture = tmp_path / "traffic.png"
    given = ("--model", target_path(), "--concurrency", "1,3", "--plot", picture, *QUICK)
    report, said = call(*given)
    assert (report["drafter"], report["weights"], report["way"]) == ("ngram", "real", "engine")
    assert [level["clients"] for level in report["levels"]] == [1, 3]
    for level in report["levels"]:
        plain, drafted = level["plain"]["tokens_per_second"], level["speculative"]["tokens_per_second"]
        assert level["num_requests"] == 5
        assert len(plain["runs"]) == 2
        assert level["times_plain"] == pytest.approx(drafted["median"] / plain["median"], rel=1e-3)
        assert level["is_under_plain"] == (level["level"] in report["levels_under_plain"])
        for name in ("ttft_ms", "tpot_ms"):
            assert 0 < level["speculative"][name]["median"] <= level["speculative"][name]["p99"]
    for words in ("TTFT ms", "TPOT ms", "prompts of 9 tokens, answers of 6", "3 clients: outrider plain"):
        assert words in said
    with Image.open(picture) as image:
        assert image.format == "PNG"
        colours = {colour for _, colour in image.getcolors(10**6) or []}
    assert set(COLOURS.values()) <= colours


def test_plain_alone_and_at_a_rate(target_path: Callable[..., Path], tmp_path: Path) -> None:
    given = ("--model", target_path(), "--no-draft", "--rate", "200,400", "--plot", tmp_path / "a.png")
    report, said = call(*given, *QUICK, "--temperature", "0.8", "--top-p", "0.9", "--json")
    assert [level["request_rate"] for level in report["levels"]] == [200, 400]
    assert (report["temperature"], report["top_p"]) == (0.8, 0.9)
    assert report["drafter"] is None
    assert all("speculative" not in level for level in report["levels"])
    assert "TTFT" not in said
    assert (tmp_path / "a.png").exists()


def test_random_weights_of_a_shape(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SHAPE))
    given = ("--shape", path, "--draft", "eagle3", "--force", "--accept-length", "3", "--concurrency", "2")
    report, said = call(*given, *QUICK, "--answer-len", "40", "--plot", tmp_path / "a.png")
    assert (report["weights"], report["accept_length"]) == ("random", 3.0)
    assert report["levels"][0]["speculative"]["accept_length"] == pytest.approx(3, abs=0.3)
    assert "is made up: this is not real text" in said


def test_a_server_is_told_what_the_engine_would_be(target_path: Callable[..., Path]) -> None:
    options = EngineOptions(str(target_path()), num_speculative_tokens=3, device="cpu", threads=2)
    config = options.config(default_method="ngram", max_num_seqs=7, max_model_len=48)
    drafted = server_arguments(options, config)
    plain = server_arguments(options, replace(config, speculative=None))
    for told in (drafted, plain):
        pairs = dict(pairwise(told))
        assert [pairs[name] for name in ("--max-num-seqs", "--max-model-len", "--threads")] == ["7", "48", "2"]
        assert "--enable-prefix-caching" in told
    assert "--no-enable-prefix-caching" in server_arguments(options, replace(config, enable_prefix_caching=False))
    assert dict(pairwise(drafted))["--draft"] == "ngram"
    assert dict(pairwise(drafted))["--num-speculative-tokens"] == "3"
    assert "--no-draft" in plain
    assert not {"--draft", "--num-speculative-tokens"} & set(plain)


@pytest.mark.slow
def test_over_http(tmp_path: Path) -> None:
    given = ("--no-adaptive", *QUICK, "--num-runs", "1")  # whether drafts pay here and now is not for a test to say
    chats = ("--turns", "2", "--prompt-len", "20")
    report, said = call("--http", "--concurrency", "2", "--plot", tmp_path / "a.png", *given, *chats)
    assert (report["way"], report["model"], report["drafter"]) == ("http", "embedded default", "embedded")
    (level,) = report["levels"]
    assert level["num_requests"] == 6, "whole chats"
    assert level["plain"]["drafted_rounds"] == 0
    assert level["speculative"]["drafted_rounds"] > 0
    assert level["plain"]["cached_share"] == level["speculative"]["cached_share"] == round(16 / (20 + 46), 4)
    assert "chats of 2 turns" in said
    assert "hits" in said
    assert level["speculative"]["tpot_ms"]["median"] > 0
    assert "over HTTP" in said


# what is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--concurrency", "0"], "--concurrency takes whole numbers above 0"),
        (["--concurrency", "1.5"], "--concurrency takes whole numbers above 0"),
        (["--rate", "fast"], "--rate takes numbers above 0"),
        (["--http", "--shape", "llama-3.1-8b"], "--http serves a checkpoint, and --shape has none"),
        (["--shape", "llama-3.1-8b", "--model", "x"], "leave out --model"),
        (["--shape", "llama-3.1-8b", "--draft", "suffix"], "no random drafter of method 'suffix'"),
        (["--shape", "nothing"], "none of the known shapes"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "traffic", *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_without_pillow(target_path: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture that was asked for is refused before anything is measured; else it is left out, and that is said."""
    given = ("--model", target_path(), "--no-draft", "--concurrency", "1", *QUICK)  # transformers makes it, with PIL
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["bench", "traffic", *map(str, given), "--plot", "a.png"])
    assert result.exit_code == 2
    told = " ".join(result.output.split())  # PIL, or the first part of it that is looked for
    assert re.search(r"a plot needs the extra vision, and PIL\S* is not installed", told), told
    assert "clients" not in result.output
    report, said = call(*given)
    assert report["levels"]
    assert "no picture: a plot needs the extra vision" in said
    assert list(tmp_path.iterdir()) == []
