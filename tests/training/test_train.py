"""`outrider train` as users run it: on the embedded target, end to end; broken off and resumed; what it refuses."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from outrider.cli import app
from outrider.llm import LLM
from outrider.pair import DEFAULT_DIRECTORY
from outrider.sampling_params import SamplingParams
from outrider.tokenizer import Tokenizer
from outrider.training import course, options
from outrider.training.conversations import Conversation, read_conversations
from outrider.training.regenerate import Regeneration, as_they_are, regenerate
from outrider.training.texts import load_texts

THINGS = (
    "a dog", "the moon", "a small boat", "an old clock", "a cat", "the sea", "my friend", "a bird", "a garden",
    "a red kite", "the rain", "a lost key", "a bear", "a lighthouse", "a little girl", "an apple tree",
)  # fmt: skip
ASKS = (
    "Tell a short story about {}.", "Write a letter about {}.", "Explain {} to a child.", "Describe {}.",
    "Hello! What do you think of {}?", "Give three ideas about {}.", "What is {}?", "Write a poem about {}.",
)  # fmt: skip
SMALL = ("--threads", "1", "--tokens-per-step", "512", "--row-len", "128", "--validations", "1", "--held-out", "6",
         "--validation-tokens", "32", "--answer-tokens", "48", "-k", "2")  # fmt: skip


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["train", *map(str, arguments), "--device", "cpu"])


def write(path: Path, entries: Sequence[Any]) -> Path:
    path.write_text("\n".join(json.dumps(entry) for entry in entries))
    return path


def test_from_prompts_to_a_drafter_that_serves(tmp_path: Path) -> None:
    """On the embedded target, in well under a minute: what it brings is what the engine measures with it."""
    data = write(tmp_path / "prompts.jsonl", [{"prompt": ask.format(thing)} for thing in THINGS for ask in ASKS])
    out = tmp_path / "drafter"
    rates = ("--matrix-rate", "0.04", "--rate", "0.003", "--draft-vocabulary", "512")
    done = run("eagle3", "--data", data, "--out", out, "--max-steps", "60", *SMALL, *rates, "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["accept_length_before"] < 1.1
    assert report["accept_length_after"] > 1.5
    assert 0.85 < report["coverage"] < 1
    written = {path.name for path in out.iterdir()}
    assert {"training.json", "training.png", "README.md", "config.json", "model.safetensors"} <= written
    assert "training.png" in (out / "README.md").read_text()
    with LLM(
        DEFAULT_DIRECTORY / "target", {"model": str(out), "num_speculative_tokens": 2, "adaptive": False}, device="cpu"
    ) as llm:
        assert llm.drafter is not None
        assert type(llm.drafter).__name__ == "Eagle3"
        greedy = SamplingParams(temperature=0, max_tokens=40)
        (output,) = llm.chat([{"role": "user", "content": "Tell a short story about a dog."}], greedy)
    assert output.outputs[0].speculation.accept_length > 1.2


@pytest.mark.parametrize("method", ["dflash"])
def test_broken_off_and_resumed(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C writes everything down, and the resumed run ends where the undisturbed one ends, to the last bit."""
    data = write(tmp_path / "prompts.jsonl", [{"prompt": ask.format("a dog")} for ask in ASKS])
    few = (method, "--data", data, *SMALL, "--answer-tokens", "24", "--held-out", "2", "--max-steps", "4", "--json")
    assert run(*few, "--out", tmp_path / "whole").exit_code == 0
    step, steps = course.Trainer.step, []

    def interrupted(self: Any, progress: float) -> None:
        if len(steps) == 2:
            steps.append(progress)
            raise KeyboardInterrupt
        steps.append(progress)
        step(self, progress)

    monkeypatch.setattr(course.Trainer, "step", interrupted)
    broken = run(*few, "--out", tmp_path / "broken")
    assert broken.exit_code == 130
    assert json.loads(broken.stdout)["steps"] == 2
    again = run(*few, "--out", tmp_path / "broken")
    assert again.exit_code == 2
    assert "--resume" in again.stderr
    monkeypatch.setattr(LLM, "generate", counted(LLM.generate, calls := []))
    resumed = run(*few, "--out", tmp_path / "broken", "--resume")
    assert json.loads(resumed.stdout)["steps"] == 4
    assert len(calls) == 4  # two validations at two temperatures: nothing was generated again
    wanted, found = (load_file(tmp_path / name / "training" / "state.safetensors") for name in ("whole", "broken"))
    assert wanted.keys() == found.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def counted(function: Callable[..., Any], calls: list[int]) -> Callable[..., Any]:
    def call(*given: Any, **named: Any) -> Any:
        calls.append(1)
        return function(*given, **named)

    return call


def test_conversations_of_all_forms(tmp_path: Path) -> None:
    chat = [("user", "Hi"), ("assistant", "Hello"), ("user", "And?")]
    forms = [
        {"messages": [{"role": role, "content": content} for role, content in chat]},
        {"conversations": [{"from": {"user": "human", "assistant": "gpt"}[r], "value": c} for r, c in chat]},
        {"turns": ["Hi", "And?"]},
        {"prompt": "Hi"},
        {"text": "Once upon a time"},
    ]
    found = read_conversations(write(tmp_path / "some.jsonl", forms))
    assert found[0] == found[1] == Conversation(tuple(chat))
    assert found[0].asked() == list(found[2].messages)
    assert found[3:] == [Conversation((("user", "Hi"),)), Conversation(text="Once upon a time")]
    (tmp_path / "list.json").write_text(json.dumps(forms))
    assert read_conversations(tmp_path / "list.json") == found
    (tmp_path / "plain.txt").write_text("One text\nof two lines.\n\nAnother.\n")
    assert [each.text for each in read_conversations(tmp_path / "plain.txt")] == ["One text\nof two lines.", "Another."]


def test_the_target_answers_turn_by_turn() -> None:
    """Tokens come straight from generation; only what the target said is learnt; a template's text, all in all."""
    talk = Conversation((("user", "Hello!"), ("assistant", "not this"), ("user", "Tell a story about a dog.")))
    with LLM(DEFAULT_DIRECTORY / "target", None, device="cpu", threads=1) as llm:
        how = Regeneration(max_tokens=24, max_len=200, temperatures=(0.0,))
        (text,) = regenerate(llm, [talk], how)
        tokenizer = llm.get_tokenizer()
        whole = tokenizer.decode(text.tokens.tolist(), skip_special_tokens=False)
    assert "not this" not in whole
    assert whole.startswith("<|user|>Hello!<|end|><|assistant|>")
    assert whole.count("<|user|>") == whole.count("<|assistant|>") == 2
    assert "<|end|><|user|>Tell a story about a dog.<|end|><|assistant|>" in whole
    assert "<|end|><|end|>" not in whole
    said = [int(token) for token, learnt in zip(text.tokens[1:], text.learnt[:-1], strict=True) if learnt]
    assert tokenizer.decode(said, skip_special_tokens=False) == whole.replace(
        "<|user|>Tell a story about a dog.<|end|><|assistant|>", ""
    ).removeprefix("<|user|>Hello!<|end|><|assistant|>")


def test_answers_that_are_the_targets_already() -> None:
    tokenizer = Tokenizer.from_directory(DEFAULT_DIRECTORY / "target")
    assert tokenizer is not None
    talk = Conversation((("user", "Hi"), ("assistant", "Hello there."), ("user", "And?"), ("assistant", "Bye.")))
    (text,) = as_they_are([talk], tokenizer, chat=True)
    shown = tokenizer.decode(text.tokens.tolist(), skip_special_tokens=False)
    assert shown == "<|user|>Hi<|end|><|assistant|>Hello there.<|end|><|user|>And?<|end|><|assistant|>Bye.<|end|>"
    said = [int(token) for token, learnt in zip(text.tokens[1:], text.learnt[:-1], strict=True) if learnt]
    assert tokenizer.decode(said, skip_special_tokens=False) == "Hello there.<|end|>Bye.<|end|>"


@pytest.mark.parametrize(
    ("content", "arguments", "said"),
    [
        ("no json\n", (), "line 1 is no JSON"),
        ('{"prompt": "a"}\n{"quest": "b"}\n', (), "line 2: knows none"),
        ('{"messages": [{"role": "nobody", "content": "a"}]}', (), "nobody is called 'nobody'"),
        ("\n", (), "holds nothing to learn from"),
        ('{"prompt": "a"}', ("--regenerate", "no"), "holds no answers"),
        ('{"prompt": "a"}', ("--minutes", "1"), "--minutes N or --max-steps N"),
        ('{"prompt": "a"}', ("--row-len", "40"), "multiple of 16"),
        ('{"prompt": "a"}', ("--loss", "l2"), "kl, ce, mixed"),
        ('{"prompt": "a"}', ("--intermediate-size", "0"), "at least 1"),
    ],
)  # fmt: skip
def test_what_is_refused_before_any_work(
    content: str, arguments: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LLM, "__init__", lambda *given, **named: pytest.fail("a model was loaded"))
    (tmp_path / "data.jsonl").write_text(content)
    done = run("eagle3", "--data", tmp_path / "data.jsonl", "--out", tmp_path / "out", "--max-steps", "1", *arguments)
    assert done.exit_code == 2
    assert said in done.stderr
    assert not (tmp_path / "out").exists()


def test_what_is_refused_of_targets(
    target_path: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LLM, "__init__", lambda *given, **named: pytest.fail("a model was loaded"))
    data = write(tmp_path / "data.jsonl", [{"prompt": "a"}])
    few = ("--data", data, "--out", tmp_path / "out", "--max-steps", "1")
    bare = tiny.save_target(tmp_path / "bare")
    tiny.save_tokenizer(bare)
    (bare / "tokenizer_config.json").write_text("{}")
    assert "has no chat template" in run("eagle3", *few, "--target", bare).stderr
    assert "outrider train knows" in run("ngram", *few).stderr
    monkeypatch.setattr(options, "_room", lambda device: 1000)
    assert "there is no room for one row of 256 tokens" in run("eagle3", *few).stderr


def test_nothing_left_after_cutting(tmp_path: Path) -> None:
    data = write(tmp_path / "data.jsonl", [{"prompt": "word " * 300}] * 4)
    done = run(
        "eagle3", "--data", data, "--out", tmp_path / "out", "--max-steps", "1", "--row-len", "64", "--threads", "1"
    )
    assert done.exit_code == 2
    assert "nothing is left" in done.stderr
    assert load_texts(tmp_path / "out" / "training" / "texts.safetensors", {}) is None


def test_a_drafter_helps_the_target_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same texts, in fewer rounds."""
    data, drafter = write(tmp_path / "prompts.jsonl", [{"prompt": ask.format("a dog")} for ask in ASKS]), "drafter"
    few = ("eagle3", "--data", data, *SMALL, "--answer-tokens", "24", "--held-out", "2", "--texts-only")
    rounds: dict[str, int] = {}
    plain = LLM.generate

    def generate(llm: LLM, *args: Any, **options: Any) -> Any:
        outputs = plain(llm, *args, **options)
        rounds[name] = rounds.get(name, 0) + sum(each.outputs[0].speculation.rounds for each in outputs)
        return outputs

    monkeypatch.setattr(LLM, "generate", generate)
    own = DEFAULT_DIRECTORY / drafter
    for name, more in (("alone", ()), ("draft", ("--draft", own)), ("n-gram", ("-d", "ngram"))):
        done = run(*few, "--out", tmp_path / name, *more)
        assert done.exit_code == 0, done.output
    texts = {name: load_file(str(tmp_path / name / "training" / "texts.safetensors")) for name in rounds}
    for name, found in texts.items():
        assert all(torch.equal(found[part], texts["alone"][part]) for part in found), name
    assert rounds["draft"] < 0.8 * rounds["alone"]
    refused = run(*few, "--out", tmp_path / "refused", "--draft", "eagel3")
    assert refused.exit_code == 2
    assert "did you mean eagle3?" in refused.stderr
    assert not (tmp_path / "refused" / "training").exists()


def test_texts_of_one_run_teach_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written by one, learnt from by another, which asks the target nothing but what validation asks."""
    data = write(tmp_path / "prompts.jsonl", [{"prompt": ask.format("a dog")} for ask in ASKS])
    few = ("eagle3", "--data", data, *SMALL, "--answer-tokens", "16", "--held-out", "2", "--json")
    made = run(*few, "--out", tmp_path / "texts", "--texts-only")
    assert made.exit_code == 0, made.output
    said = json.loads(made.stdout)
    assert said["count"] == len(ASKS) - 1  # one in five is held out
    with monkeypatch.context() as changed:  # in batches, of which several are under way at once: the same texts
        changed.setattr("outrider.training.run.BATCH", 3)
        for count in (1, 2):
            changed.setattr("outrider.training.run.NUM_STREAMS", {"cpu": count})
            assert run(*few, "--out", tmp_path / str(count), "--texts-only").exit_code == 0
        alone, beside = (load_file(str(tmp_path / f"{count}/training/texts.safetensors")) for count in (1, 2))
        assert all(torch.equal(alone[name], beside[name]) for name in alone)
    monkeypatch.setattr(LLM, "generate", counted(LLM.generate, calls := []))
    done = run(
        *few, "--out", tmp_path / "drafter", "--texts", said["texts"], "--texts", said["texts"], "--max-steps", "1"
    )
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["texts"] == 2 * said["count"]
    assert len(calls) == 4  # two validations at two temperatures
    for wrong, why in (
        (("--texts-only", "--max-steps", "1"), "--texts-only trains nothing"),
        (("--texts", data, "--max-steps", "1"), "holds no texts of a run"),
        (("--texts", said["texts"], "--max-steps", "1", "--draft", "ngram"), "leave out --draft"),
        (("--regenerate", "no", "--max-steps", "1", "--draft", "ngram"), "leave out --draft"),
    ):
        refused = run(*few, "--out", tmp_path / "no", *wrong)
        assert refused.exit_code == 2
        assert why in refused.stderr
