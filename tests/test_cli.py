"""The outrider command on tiny checkpoints with a tiny tokenizer: what it prints where, and how it exits.
Text, JSON, comparison, conversation; colours only for terminals; errors in one line."""

import io
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import tokenizers
from rich.console import Console
from tokenizers import decoders, models, pre_tokenizers, trainers
from typer.testing import CliRunner, Result

import outrider.engine.round
from outrider import LLM, SamplingParams, __version__
from outrider.cli import app
from outrider.console import Consoles
from outrider.conversation import ChatSession, converse
from outrider.measure import Question, first_difference, run
from outrider.outputs import CompletionOutput

ESCAPE = "\x1b"
PROMPT = "the quick brown fox"
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TIMING_KEYS = {"text", "token_ids", "num_tokens", "seconds", "ttft", "tokens_per_second"}
KEYS = TIMING_KEYS | {"rounds", "accept_length", "acceptance_per_position", "finish_reason", "seed", "model", "method"}


def save_tokenizer(directory: Path, template: str | None = TEMPLATE) -> None:
    """Byte-level, of the bytes that this text needs: all 256 would leave no room for special tokens."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=tiny.VOCAB, special_tokens=["<pad>", "<s>", "</s>"], show_progress=False, min_frequency=1
    )
    backend.train_from_iterator([Path(__file__).read_text(encoding="utf-8")], trainer)
    backend.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tiny.save_target(tmp_path_factory.mktemp("target"))
    save_tokenizer(directory)
    return str(directory)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random head, as --speculative-config: it agrees with nothing, so it must be forced."""
    return json.dumps({"model": str(tiny.save_eagle3(tmp_path_factory.mktemp("head"))), "force": True})


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def invoke(*arguments: str, text: str | None = None) -> Result:
    return CliRunner().invoke(app, arguments, input=text)


def generate_json(*arguments: str) -> dict[str, Any]:
    result = invoke("generate", PROMPT, "--json", "--max-tokens", "12", *arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)  # fails if there is anything else


# generate


def test_json_without_a_drafter(target: str) -> None:
    report = generate_json("--model", target)
    assert report.keys() == KEYS
    assert report["num_tokens"] == len(report["token_ids"]) <= 12
    assert 0 < report["ttft"] <= report["seconds"]
    assert report["tokens_per_second"] == pytest.approx(report["num_tokens"] / report["seconds"])
    assert (report["model"], report["method"], report["accept_length"]) == (target, None, 1.0)
    assert report["acceptance_per_position"] == []


def test_compare_with_an_eagle3_head(target: str, head: str) -> None:
    report = generate_json(
        "--model", target, "--speculative-config", head, "-k", "3", "--compare", "--temperature", "0.8"
    )
    assert report.keys() == KEYS | {"plain", "identical", "speedup"}
    assert report["plain"].keys() == TIMING_KEYS
    assert report["identical"] is True
    assert report["token_ids"] == report["plain"]["token_ids"]
    assert report["text"] == report["plain"]["text"]
    assert report["speedup"] == pytest.approx(report["plain"]["seconds"] / report["seconds"])
    assert report["method"] == "eagle3"
    assert len(report["acceptance_per_position"]) == 3


def test_a_target_that_drafts_for_itself_is_always_right(target: str) -> None:
    report = generate_json("--model", target, "--draft", target, "--num-speculative-tokens", "2")
    assert report["method"] == "draft_model"
    assert report["accept_length"] > 2
    assert report["token_ids"] == generate_json("--model", target)["token_ids"]


@pytest.mark.parametrize(
    "options", [["--draft", "ngram"], ["--speculative-config", '{"method": "ngram", "prompt_lookup_min": 1}']]
)
def test_ngram(target: str, options: list[str]) -> None:
    assert generate_json("--model", target, *options)["method"] == "ngram"


def test_the_same_seed_gives_the_same_tokens(target: str) -> None:
    options = ["--model", target, "--temperature", "1.5"]
    chosen = generate_json(*options)
    again = generate_json(*options, "--draft", "ngram", "--seed", str(chosen["seed"]))
    assert again["token_ids"] == chosen["token_ids"]
    assert generate_json(*options)["seed"] != chosen["seed"]


def test_memory_is_one_line_on_stderr(target: str, head: str) -> None:
    for command in (["generate", PROMPT, "--json"], ["chat"]):
        result = invoke(*command, "--model", target, "--speculative-config", head, "--max-model-len", "64")
        (line,) = [line for line in result.stderr.splitlines() if line.startswith("memory: ")]
        for word in ("weights", "drafter", "cache up to", "pages", "context 64 tokens"):
            assert word in line, line
        assert "memory" not in result.stdout


def test_text_goes_to_stdout_and_the_card_to_stderr(target: str, head: str) -> None:
    expected = generate_json("--model", target)["text"]
    result = invoke("generate", PROMPT, "--model", target, "--speculative-config", head, "-n", "12", "--compare")
    assert result.exit_code == 0
    assert result.stdout == expected + "\n"
    for word in ("tokens/s", "rounds", "accept length", "acceptance", "speed-up", "identical   yes"):
        assert word in result.stderr
    assert ESCAPE not in result.output


def test_a_difference_is_exit_status_1(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = outrider.engine.round.judge
    monkeypatch.setattr(
        outrider.engine.round,
        "judge",
        lambda step, choice, out=None: honest(step, (choice + 1) % tiny.VOCAB if step.depth else choice, out),
    )
    arguments = ("generate", PROMPT, "--model", target, "--draft", "ngram", "-n", "4", "--compare")
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert "NO, they part at token 1" in result.stderr
    result = invoke(*arguments, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["identical"] is False


def test_where_the_prompt_comes_from(target: str, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT + "\n")
    common = ("--model", target, "-n", "6", "--json")
    given = invoke("generate", PROMPT, *common)
    for other in (
        invoke("generate", "-", *common, text=PROMPT + "\n"),
        invoke("generate", "--prompt-file", str(file), *common),
    ):
        assert json.loads(other.stdout)["token_ids"] == json.loads(given.stdout)["token_ids"]


def test_the_chat_template_is_used_unless_told_otherwise(target: str) -> None:
    llm = LLM(target)
    asked: list[dict[str, Any]] = [{"role": "user", "content": PROMPT}]
    params = SamplingParams(max_tokens=12, temperature=0)
    assert generate_json("--model", target)["token_ids"] == llm.chat(asked, params)[0].outputs[0].token_ids
    raw = llm.generate(PROMPT, params)[0].outputs[0].token_ids
    assert generate_json("--model", target, "--no-chat")["token_ids"] == raw


# errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["hi", "--speculative-config", "{method: ngram}"], "not valid JSON"),
        (["hi", "--speculative-config", "[1]"], "must be a JSON object"),
        (["hi", "--speculative-config", '{"methd": "ngram"}'], "does not know methd"),
        (["hi", "--speculative-config", '{"method": "psychic"}'], "unknown speculative method 'psychic'"),
        (["hi", "--speculative-config", '{"method": "ngram", "prompt_lookup_min": "x"}'], "prompt_lookup_min"),
        (["hi", "--speculative-config", '{"model": 5}'], "must be a name or a path"),
        (["hi", "--speculative-config", '{"model": "x", "taps": 5}'], "taps must be"),
        (["hi", "--draft", "ngram", "--no-draft"], "contradict"),
        (["hi", "--num-speculative-tokens", "3"], "needs a drafter"),
        (["hi", "--draft", "ngram", "-k", "0"], "from 1 to 64"),
        (["hi", "--compare"], "needs a drafter"),
        (["hi", "--temperature", "-1"], "temperature must be"),
        (["hi", "--dtype", "int3"], "unknown dtype"),
        (["hi", "--device", "abacus"], "unknown device"),
        (["hi", "--device", "cuda:99"], "CUDA devices are visible"),
        (["hi", "--max-model-len", "100000"], "max_model_len"),
        (["hi" * 4000], "shorten it"),
        (["hi", "--prompt-file", "pyproject.toml"], "give one prompt"),
        ([], "give one prompt"),
    ],
)
def test_errors_are_one_line_and_exit_status_2(target: str, arguments: list[str], words: str) -> None:
    result = invoke("generate", *arguments, "--model", target)
    assert result.exit_code == 2
    assert result.stdout == ""
    (error,) = [line for line in result.stderr.splitlines() if not line.startswith("memory: ")]
    assert error.startswith("error: ")
    assert words in result.stderr


def test_a_missing_model_and_a_damaged_one(tmp_path: Path) -> None:
    result = invoke("generate", "hi", "--model", str(tmp_path / "nothing"))
    assert (result.exit_code, "does not exist" in result.stderr) == (2, True)
    (tmp_path / "config.json").write_text("{")
    result = invoke("chat", "--model", str(tmp_path))
    assert (result.exit_code, "not valid JSON" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    "arguments", [["--debug", "generate", "hi", "-k", "0"], ["generate", "hi", "-k", "0", "--debug"]]
)
def test_debug_shows_the_error_itself(arguments: list[str]) -> None:
    assert isinstance(invoke(*arguments).exception, ValueError)


def test_unknown_options_and_commands() -> None:
    assert invoke("generate", "hi", "--sped").exit_code == 2
    assert invoke("ride").exit_code == 2
    assert invoke("generate", "--prompt-file", "/nonexistent").exit_code == 2


# chat


def test_piped_messages_make_a_conversation(target: str) -> None:
    result = invoke("chat", "--model", target, "-n", "8", text="the fox\n\nthe dog\n/quit\nunseen\n")
    assert result.exit_code == 0
    llm = LLM(target)
    params = SamplingParams(max_tokens=8, temperature=0)
    messages: list[dict[str, Any]] = []
    expected = ""
    for content in ("the fox", "the dog"):
        messages.append({"role": "user", "content": content})
        text = llm.chat(messages, params)[0].outputs[0].text
        messages.append({"role": "assistant", "content": text})
        expected += text + "\n"
    assert result.stdout == expected
    assert ESCAPE not in result.output


def test_commands_of_a_conversation(target: str, head: str) -> None:
    lines = ["/stats", "the fox", "/plain", "the fox", "/stats", "/reset", "/plain", "the fox", "/nonsense", "/help"]
    arguments = ("--model", target, "--speculative-config", head, "-n", "8", "--system", "be brief")
    result = invoke("chat", *arguments, text="\n".join(lines))
    assert result.exit_code == 0
    for words in (
        "no answers yet",
        "speculation is off",
        "2 answers",
        "accept length",
        "a new conversation",
        "speculation is on",
        "unknown command /nonsense",
    ):
        assert words in result.stderr
    alone = invoke("chat", *arguments, text="the fox")
    assert result.stdout.startswith(alone.stdout)
    assert result.stdout.endswith(alone.stdout)  # after /reset nothing is left but the system message


def test_a_conversation_that_outgrows_the_context(target: str) -> None:
    result = invoke("chat", "--model", target, "--max-model-len", "32", text="word " * 100)
    assert (result.exit_code, "shorten it" in result.stderr) == (2, True)


def test_chat_needs_a_template(tmp_path: Path) -> None:
    save_tokenizer(tiny.save_target(tmp_path), template=None)
    result = invoke("chat", "--model", str(tmp_path), text="hi")
    assert (result.exit_code, "has no chat template" in result.stderr) == (2, True)


def test_at_a_terminal_errors_do_not_end_the_conversation(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def at_terminal(script: list[Any]) -> str:
        def read(prompt: str) -> str:
            line = script.pop(0)
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr("builtins.input", read)
        monkeypatch.setattr(sys, "stdin", type("Terminal", (), {"isatty": lambda self: True})())
        out, about = io.StringIO(), io.StringIO()
        with LLM(target, max_model_len=64, max_num_seqs=1) as llm:
            params = SamplingParams(max_tokens=4, temperature=0)
            converse(ChatSession(llm, params, Consoles(Console(file=out), Console(file=about))))
        assert not script
        return about.getvalue()

    shown = at_terminal(["word " * 100, KeyboardInterrupt(), "the fox", EOFError()])
    assert "error: " in shown
    assert "raise max_model_len" in shown
    assert "4 tokens, " in shown


# interruption


def test_an_interrupt_ends_the_answer_between_steps(target: str) -> None:
    with LLM(target, max_num_seqs=1) as llm:
        question = Question(PROMPT, SamplingParams(max_tokens=50, temperature=0, ignore_eos=True))

        def interrupt(completion: CompletionOutput) -> None:
            if len(completion.token_ids) == 5:
                signal.raise_signal(signal.SIGINT)

        stopped = run(llm, question, interrupt)
        assert stopped.interrupted
        assert stopped.num_tokens == 5
        assert not llm.engine.has_work
        assert not run(llm, question).interrupted  # and the engine goes on


def test_two_interrupts_are_an_interrupt(target: str) -> None:
    def interrupt(completion: CompletionOutput) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with LLM(target, max_num_seqs=1) as llm, pytest.raises(KeyboardInterrupt):
        run(llm, Question(PROMPT, SamplingParams(max_tokens=5)), interrupt)
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_while_loading_has_its_status_and_nothing_to_say(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "from_config", interrupted)
    result = invoke("generate", PROMPT, "--model", target)
    assert (result.exit_code, result.output) == (130, "")


def test_first_difference() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2], [1]) == 1


# the command itself


def test_version_and_help() -> None:
    for arguments in (["version"], ["--version"]):
        assert invoke(*arguments).stdout == f"outrider {__version__}\n"
    for arguments in (["--help"], ["generate", "--help"], ["chat", "-h"], ["version", "--help"]):
        result = invoke(*arguments)
        assert result.exit_code == 0
        assert "Example" in result.stdout
    assert {"generate", "chat", "certify", "bench", "version"} <= set(invoke("--help").stdout.split())


def test_python_dash_m(target: str) -> None:
    command = [sys.executable, "-m", "outrider", "generate", "-", "--model", target, "-n", "6"]
    result = subprocess.run(command, input=PROMPT.encode(), capture_output=True, timeout=60, check=True)
    assert ESCAPE.encode() not in result.stdout + result.stderr
    assert b"tokens/s" in result.stderr
