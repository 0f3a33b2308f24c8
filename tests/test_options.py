"""Options that all commands share: what they mean, that every command has them, and what is refused before loading."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import typer.main
from samples import METHODS, drafter_settings, sample_target, suits
from typer.testing import CliRunner

import outrider.pair
from outrider.bench.prompts import PromptText, PromptVocabulary
from outrider.checkpoints.checkpoint import open_checkpoint
from outrider.checkpoints.loader import build_target
from outrider.cli import app
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.drafters.base import drafters
from outrider.drafters.ngram import Ngram
from outrider.llm import LLM
from outrider.options import EngineOptions
from outrider.pair import DEFAULT_DIRECTORY
from outrider.preflight import WithoutMemory, check_chat, check_drafter, check_images
from outrider.server.command import LimitOptions

RUNNERS = {"generate": "hi", "chat": "", "serve": "", "certify": "", "doctor": "", "bench latency": ""}
RUNNERS |= {"bench traffic": "", "bench depth": "", "bench startup": ""}
SHARED = {
    *("--model", "--draft", "--no-draft", "--speculative-config", "--num-speculative-tokens", "--force"),
    *("--no-adaptive", "--dtype", "--device", "--max-model-len", "--threads", "--exact", "--enforce-eager"),
}


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.save_eagle3(tmp_path_factory.mktemp("head")))


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a weight is a failure: what is refused must be refused before."""

    def fail(*_: Any) -> None:
        raise AssertionError("weights are being read")

    monkeypatch.setattr(outrider.pair, "load_weights", fail)


def save_without_template(directory: Path) -> None:
    """A target with a tokenizer, but without a chat template."""
    tiny.save_target(directory)
    tiny.save_tokenizer(directory)
    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    del settings["chat_template"]
    path.write_text(json.dumps(settings))


def options_of(names: str) -> set[str]:
    command: Any = typer.main.get_command(app)
    for name in names.split():
        command = command.commands[name]
    return {option for parameter in command.params for option in parameter.opts}


def refusal(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, env={"OUTRIDER_API_KEY": None})
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


# the same everywhere


@pytest.mark.parametrize("names", [*RUNNERS, "bench throughput", "bench overhead"])
def test_every_command_that_runs_a_model_has_them(names: str) -> None:
    assert options_of(names) >= SHARED


@pytest.mark.parametrize("names", ["generate", "certify", "doctor", "bench latency", "bench throughput"])
def test_every_command_that_takes_prompts_can_be_told_about_the_chat_template(names: str) -> None:
    assert "--chat" in options_of(names)


def test_the_chat_template_surrounds_text_unless_told_otherwise(tmp_path: Path) -> None:
    vocabulary = PromptVocabulary.of(DEFAULT_DIRECTORY / "target")
    assert vocabulary.tokenizer is not None
    asked = vocabulary.tokenizer.chat([{"role": "user", "content": "Hello"}])
    as_chat, raw = vocabulary.tokenizer.encode(asked, add_special_tokens=False), vocabulary.tokenizer.encode("Hello")
    assert as_chat != raw
    for prompt, expected in ((PromptText("Hello"), as_chat), (PromptText("Hello", is_chat=False), raw)):
        assert vocabulary.encode(prompt) == expected
        assert vocabulary.encode(prompt, chat=True) == as_chat
        assert vocabulary.encode(prompt, chat=False) == raw
    save_without_template(tmp_path)
    bare = PromptVocabulary.of(tmp_path)
    assert bare.encode(PromptText("a")) == bare.encode(PromptText("a"), chat=False)
    with pytest.raises(ValueError, match="no chat template"):
        bare.encode(PromptText("a"), chat=True)


# what they mean


def test_which_drafter_the_options_name(target_path: Callable[..., Path], head: str) -> None:
    model = str(target_path())
    assert EngineOptions(model).config().speculative is None
    assert EngineOptions(no_draft=True).config().speculative is None
    own = EngineOptions().config()
    assert own.model == DEFAULT_DIRECTORY / "target"
    assert own.speculative is not None
    assert own.speculative.model == str(DEFAULT_DIRECTORY / "drafter")
    ngram = EngineOptions(model, draft="ngram", num_speculative_tokens=7, force=True, no_adaptive=True)
    found = ngram.config().speculative
    assert found is not None
    assert (found.method, found.num_speculative_tokens, found.force, found.adaptive) == ("ngram", 7, True, False)
    found = EngineOptions(model, draft=head).config().speculative
    assert found is not None
    assert (found.method, found.model, found.force, found.adaptive) == (None, head, False, True)
    given = '{"method": "ngram", "prompt_lookup_min": 1}'
    found = EngineOptions(model, speculative_config=given).config().speculative
    assert found is not None
    assert found.own(Ngram.own_settings) == {"prompt_lookup_min": 1, "prompt_lookup_max": 8}
    found = EngineOptions(speculative_config='{"num_speculative_tokens": 2}').config().speculative
    assert found is not None
    assert (found.model, found.num_speculative_tokens) == (str(DEFAULT_DIRECTORY / "drafter"), 2)
    found = EngineOptions(model, num_speculative_tokens=3).config(default_method="ngram").speculative
    assert found is not None
    assert (found.method, found.num_speculative_tokens) == ("ngram", 3)


def test_the_environment_may_name_the_model(target_path: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    mine, other = str(target_path()), str(target_path("qwen3"))
    monkeypatch.setenv("OUTRIDER_MODEL", mine)
    assert EngineOptions().named(None).model == mine
    assert EngineOptions().named(None, needs_model=False).model is None  # a shape with random weights
    assert EngineOptions(other).named(None).model == EngineOptions().named(other).model == other
    arguments = ["generate", "--no-chat", "-n", "2", "--json", "--prompt-file", str(Path(mine) / "config.json")]
    assert f"{mine} has none" in CliRunner().invoke(app, arguments).stderr  # it has no tokenizer, the embedded one does
    monkeypatch.setenv("OUTRIDER_MODEL", "")
    assert EngineOptions().named(None).model is None


def test_a_model_may_be_named_in_either_way(target_path: Callable[..., Path]) -> None:
    model = str(target_path())
    assert EngineOptions().named(model, "ngram") == EngineOptions(model, "ngram")
    assert EngineOptions(model).named(model) == EngineOptions(model).named(None) == EngineOptions(model)
    with pytest.raises(ValueError, match="--model a and MODEL b contradict"):
        EngineOptions("a").named("b")
    with pytest.raises(ValueError, match="--draft a and DRAFTER b contradict"):
        EngineOptions(draft="a").named(None, "b")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"draft": "ngram", "speculative_config": "{}"}, "--draft and --speculative-config contradict"),
        ({"draft": "ngram", "no_draft": True}, "--draft and --no-draft contradict"),
        ({"speculative_config": "{"}, "not valid JSON"),
        ({"speculative_config": "[]"}, "JSON object"),
        ({"num_speculative_tokens": 3}, "--num-speculative-tokens needs a drafter"),
        ({"force": True}, "--force needs a drafter"),
        ({"no_adaptive": True}, "--no-adaptive needs a drafter"),
    ],
)
def test_contradictions(target_path: Callable[..., Path], options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        EngineOptions(str(target_path()), **options).config()


def test_a_configuration_opens_an_engine_as_it_says(target_path: Callable[..., Path]) -> None:
    config = EngineConfig(target_path(), max_model_len=48, max_num_seqs=3, page_size=4, exact=True, watchdog=None)
    with LLM.from_config(config) as llm:
        assert llm.config == config


def test_how_much_is_computed_at_once_suits_the_device(
    target_path: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = EngineOptions(str(target_path()))
    config = options.config(**LimitOptions().of_engine())
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (16, 512)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = options.config(**LimitOptions(max_num_batched_tokens=77, gpu_memory_utilization=0.5).of_engine())
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (256, 77)
    assert config.gpu_memory_utilization == 0.5
    assert options.config(max_num_seqs=1).max_num_seqs == 1


def test_options_can_be_handed_on_to_another_command(target_path: Callable[..., Path]) -> None:
    options = EngineOptions(
        str(target_path()), draft="ngram", num_speculative_tokens=2, exact=True, max_model_len=64, threads=2
    )
    text = options.arguments()
    assert text[:4] == ["--model", str(target_path()), "--draft", "ngram"]
    assert "--exact" in text
    assert "--force" not in text
    flags = EngineOptions(force=True, no_adaptive=True, no_draft=True, enforce_eager=True).arguments()
    everything = {name for name in [*text, *flags] if name.startswith("--")}
    assert everything >= SHARED - {"--speculative-config"}


# refused before loading


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("names", RUNNERS)
def test_an_unknown_drafter_is_refused_before_loading(names: str) -> None:
    arguments = [*names.split(), *filter(None, [RUNNERS[names]])]
    said = refusal(*arguments, "--draft", "eagel3")
    assert "neither a method (did you mean eagle3?) nor a checkpoint" in said
    assert "ngram" in said
    said = refusal(*arguments, "--speculative-config", '{"method": "ngrm"}')
    assert "unknown speculative method 'ngrm'; did you mean 'ngram'?" in said


@pytest.mark.usefixtures("no_weights")
def test_a_pair_that_does_not_fit_is_refused_before_loading(target_path: Callable[..., Path], head: str) -> None:
    config = json.dumps({"model": head, "taps": [1, 2, 999]})
    assert "999" in refusal("certify", str(target_path()), "--speculative-config", config)


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("names", RUNNERS)
def test_a_drafter_given_as_the_model_is_recognised(names: str, head: str) -> None:
    arguments = [*names.split(), *filter(None, [RUNNERS[names]])]
    said = refusal(*arguments, "--model", head)
    assert f"{head} is a drafter (eagle3), not a target" in said
    assert f"--model TARGET --draft {head}" in said


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("method", METHODS)
def test_every_drafter_that_fits_is_let_through(method: str, target_path: Callable[..., Path], tmp_path: Path) -> None:
    """Built without memory, with the first target that it suits; `outrider.pair` would read weights next."""
    family = next(family for family in ("llama", "gemma4", "deepseek_v3") if suits(method, family))
    path = sample_target(method, tmp_path, target_path, family)
    values = drafter_settings(method, tmp_path, target_path, family)
    check_drafter(EngineConfig(path, SpeculativeConfig.from_dict(values)))


def test_building_without_memory_computes_all_the_same(target_path: Callable[..., Path]) -> None:
    """Every family of targets, whatever it computes when it is built, and its parameters take no memory."""
    for family in tiny.FAMILIES:
        checkpoint = open_checkpoint(target_path(family))
        with WithoutMemory():
            target = build_target(checkpoint)
        checkpoint.close()
        assert {parameter.device.type for parameter in target.parameters()} == {"meta"}, family


def test_no_target_is_taken_for_a_drafter(target_path: Callable[..., Path]) -> None:
    for family in tiny.FAMILIES:
        config = json.loads((target_path(family) / "config.json").read_text())
        assert max(drafters[name].recognises(config) for name in drafters) <= 1, family


@pytest.mark.usefixtures("no_weights")
def test_a_chat_without_a_template_is_refused_before_loading(tmp_path: Path) -> None:
    save_without_template(tmp_path)
    for arguments in (["chat"], ["generate", "hi", "--chat"]):
        assert "has no chat template" in refusal(*arguments, "--model", str(tmp_path))
    for names in ("certify", "doctor", "bench latency"):
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text('{"prompt": "hi"}\n')
        given = ["--draft", "ngram", "--prompts", str(prompts), "--chat"]
        assert "no chat template" in refusal(*names.split(), str(tmp_path), *given)
    check_chat(DEFAULT_DIRECTORY / "target")


@pytest.mark.usefixtures("no_weights")
def test_an_image_for_a_text_model_is_refused_before_loading(target_path: Callable[..., Path], tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    picture.write_bytes(b"")
    said = refusal("generate", "hi", "--image", str(picture), "--model", str(target_path()))
    assert "reads text only" in said
    check_images(target_path("gemma3_vision"))
