"""The outrider command: generate, chat, serve, route, certify, doctor, train, merge, bench, list, pull, matrix and
version. A ValueError is the user's to mend and becomes one line on standard error with exit status 2; --debug shows it
all. Whatever needs torch is imported when a command runs: help and version answer at once."""

from __future__ import annotations

import io
import json
import secrets
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider import __version__
from outrider.bench.commands import bench_app
from outrider.certify.command import certify_command
from outrider.commands import Command, Group, add, option
from outrider.console import (
    Consoles,
    StreamedText,
    loading,
    open_consoles,
    show_card,
    show_comparison,
    show_error,
    show_memory,
    show_note,
)
from outrider.doctor.command import doctor_command
from outrider.inventory import list_models, matrix, pull
from outrider.options import OUTPUT, SAMPLING, AsJson, ChatTemplate, EngineOptions, ModelArgument, NoColor, remember
from outrider.sampling_params import SamplingParams
from outrider.server.command import serve_command
from outrider.server.flags import ServeCommand
from outrider.server.router.command import route_command
from outrider.startup import importing
from outrider.training.command import train_command
from outrider.training.merge_command import merge_command

if TYPE_CHECKING:
    from outrider.config import EngineConfig
    from outrider.llm import LLM
    from outrider.measure import Comparison, Question, Run
    from outrider.prompts import Prompt

EXIT_DIFFERENT, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130
ABOUT = """LLM inference with a drafter that rides ahead. What comes out is what the target alone would have said.

\b
Examples:
  outrider chat
  outrider generate "Why is the sky blue?" --compare
  outrider generate --help
"""


class Commands(Group):
    """All sub-commands report errors in the same way."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # the reader of a pipe has seen enough
            raise
        except KeyboardInterrupt as interrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from interrupt
        except (ValueError, OSError) as error:
            if ctx.meta.get("debug"):
                raise
            show_error(open_consoles(no_color=ctx.meta.get("no_color", False)).about, error)
            raise typer.Exit(EXIT_USAGE) from error


app = typer.Typer(
    cls=Commands,
    help=ABOUT,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


# options


_SEED_HELP = "The same seed gives the same tokens, drafted or not."
_COMPARE_HELP = "Decode plainly too: same tokens, how much faster? Status 1 if not the same."
MaxTokens = Annotated[int, option(SAMPLING, "--max-tokens", "-n", metavar="N", help="Longest answer.")]
Temperature = Annotated[float, option(SAMPLING, "--temperature", "-t", metavar="T", help="0 is greedy.")]
Seed = Annotated[int | None, option(SAMPLING, "--seed", metavar="S", help=_SEED_HELP)]
TopP = Annotated[float, option(SAMPLING, "--top-p", metavar="P", help="From the likeliest tokens of this mass.")]
TopK = Annotated[int, option(SAMPLING, "--top-k", metavar="K", help="From this many tokens; 0: from all.")]
Debug = Annotated[bool, option(OUTPUT, "--debug", help="Show the traceback of an error.", callback=remember)]
PromptArgument = Annotated[
    str | None, typer.Argument(help="The prompt; - reads it from standard input.", metavar="PROMPT")
]
PromptFile = Annotated[
    Path | None,
    typer.Option("--prompt-file", "-f", metavar="FILE", help="A file with the prompt.", exists=True, dir_okay=False),
]
ImageFiles = Annotated[
    list[Path] | None,
    typer.Option("--image", "-i", metavar="FILE", help="An image; again for more.", exists=True, dir_okay=False),
]
ComparePlain = Annotated[bool, option(OUTPUT, "--compare", help=_COMPARE_HELP)]
System = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="What the model is told first.")]


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is chosen."""

    temperature: Temperature = 0.0
    seed: Seed = None
    top_p: TopP = 1.0
    top_k: TopK = 0

    def params(self, max_tokens: int) -> SamplingParams:
        return SamplingParams(max_tokens=max_tokens, **vars(self))


# generate


def generate(
    options: EngineOptions,
    sampling: SamplingOptions,
    prompt: PromptArgument = None,
    prompt_file: PromptFile = None,
    image: ImageFiles = None,
    chat_template: ChatTemplate = None,
    max_tokens: MaxTokens = 128,
    compare_plain: ComparePlain = False,
    as_json: AsJson = False,
    no_color: NoColor = False,
    debug: Debug = False,
) -> None:
    """Continue a prompt, or answer it.

    Tokens that the drafter guessed are coloured by their place in the draft.

    \b
    Examples:
      outrider generate "Why is the sky blue?"
      outrider generate "Why is the sky blue?" --compare
      outrider generate - --model org/name --draft org/name-eagle3 < prompt.txt
      outrider generate "a b c a b" -m DIRECTORY -d ngram --no-chat
      outrider generate "Hello" --temperature 0.8 --seed 7 --json
      outrider generate "What is this?" --image photo.jpg --model org/name-vl
    """
    consoles = open_consoles(no_color=no_color)
    options = options.named(None)
    params = sampling.params(max_tokens)
    if params.seed is None:
        params = replace(params, seed=secrets.randbits(32))  # one for both sides of a comparison
    text = read_prompt(prompt, prompt_file)
    with importing():
        from outrider.measure import Question, method_of
        from outrider.preflight import check_chat, check_images
    # A comparison computes every prompt afresh: found in the cache, it would flatter the drafter.
    config = options.config(max_num_seqs=1, enable_prefix_caching=not compare_plain)
    if compare_plain and config.speculative is None:
        raise ValueError("--compare needs a drafter to compare plain decoding with: add --draft")
    if chat_template:
        check_chat(config.model)
    if image:
        check_images(config.model)
    with load(config, consoles) as llm:
        show_memory(consoles.about, llm.budget)
        question = Question(_wrap_prompt(llm, text, image or [], chat_template), params)
        first = _run_and_show(llm, question, None if as_json else consoles)
        comparison = None
        if compare_plain and not first.interrupted:
            comparison = _compare_with_plain(config, consoles, llm, question, first)
        result = comparison.drafted if comparison is not None else first
        if as_json:
            typer.echo(json.dumps(_report(result, comparison, llm, options.model)))
        else:
            show_card(consoles.about, result, method_of(llm))
            if comparison is not None:
                show_comparison(consoles.about, comparison)
    if result.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    if comparison is not None and comparison.difference is not None:
        raise typer.Exit(EXIT_DIFFERENT)


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The newline that ends a file or a pipe is not part of the prompt."""
    if (prompt is None) == (prompt_file is None):
        raise ValueError("give one prompt: PROMPT, - to read it from standard input, or --prompt-file FILE")
    if prompt_file is not None:
        return prompt_file.read_text(encoding="utf-8").removesuffix("\n")
    assert prompt is not None
    return sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt


def load(config: EngineConfig, consoles: Consoles) -> LLM:
    """Loads an LLM, with a progress bar while weights are read."""
    from outrider.llm import LLM

    with loading(consoles.about) as progress:
        return LLM.from_config(config, progress)


def _wrap_prompt(llm: LLM, text: str, images: list[Path], chat_template: bool | None) -> Prompt:
    """As a message where that is wanted, or where nothing was said and the checkpoint has a chat template."""
    if chat_template is None:
        chat_template = llm.tokenizer is not None and llm.tokenizer.has_chat_template
    if not chat_template:
        return {"prompt": text, "multi_modal_data": {"image": images}} if images else text
    if not images:
        return llm.chat_prompt([{"role": "user", "content": text}])
    parts = [{"type": "image", "image": image} for image in images]
    return llm.chat_prompt([{"role": "user", "content": [*parts, {"type": "text", "text": text}]}])


def _run_and_show(llm: LLM, question: Question, consoles: Consoles | None) -> Run:
    from outrider.measure import run

    if consoles is None:
        return run(llm, question)
    shown = StreamedText(consoles.out)
    result = run(llm, question, shown.show)
    shown.finish()
    return result


def _compare_with_plain(
    config: EngineConfig, consoles: Consoles, drafted: LLM, question: Question, first: Run
) -> Comparison:
    """Against an engine without a drafter: one that only skips drafting would still do part of the drafter's work."""
    from outrider.measure import compare

    with load(replace(config, speculative=None, max_model_len=drafted.max_model_len), consoles) as plain:
        if consoles.about.is_terminal:  # no spinner: its thread would take time from what is being timed
            show_note(consoles.about, "timing both, several runs each")
        return compare(drafted, plain, question, first)


def _report(result: Run, comparison: Comparison | None, llm: LLM, model: str | None) -> dict[str, Any]:
    from outrider.measure import method_of

    speculation = result.completion.speculation
    report = result.report() | {
        "rounds": speculation.rounds,
        "accept_length": speculation.accept_length,
        "acceptance_per_position": speculation.acceptance_per_position,
        "finish_reason": result.completion.finish_reason,
        "seed": result.completion.seed,
        "model": model or "default",
        "method": method_of(llm),
    }
    if comparison is not None:
        report |= {
            "plain": comparison.plain.report(),
            "identical": comparison.difference is None,
            "speedup": comparison.speedup,
        }
    return report


# chat


def chat(
    options: EngineOptions,
    sampling: SamplingOptions,
    target: ModelArgument = None,
    system: System = None,
    max_tokens: MaxTokens = 512,
    no_color: NoColor = False,
    debug: Debug = False,
) -> None:
    """Talk with a model. From a pipe, every line is a message.

    \b
    While talking:
      /reset   forget the conversation
      /stats   speed and acceptance so far
      /plain   turn speculation off, and on again
      /quit    end, as does Ctrl-D; Ctrl-C stops the current answer only

    \b
    Examples:
      outrider chat
      outrider chat --system "You answer in one sentence."
      outrider chat org/name --draft org/name-eagle3 --temperature 0.7
      printf 'Hello\\nAnd now?\\n' | outrider chat
    """
    consoles = open_consoles(no_color=no_color)
    params = sampling.params(max_tokens)
    with importing():
        from outrider.conversation import ChatSession, converse
        from outrider.preflight import check_chat
    config = options.named(target).config(max_num_seqs=1)
    check_chat(config.model)
    with load(config, consoles) as llm:
        show_memory(consoles.about, llm.budget)
        converse(ChatSession(llm, params, consoles, system))


# what there is


def version() -> None:
    """Print the version.

    \b
    Example:
      outrider version
    """
    typer.echo(f"outrider {__version__}")


def _print_version(value: bool) -> None:
    if value:
        version()
        raise typer.Exit


@app.callback()
def _outrider(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.", callback=remember)] = False,
) -> None:
    pass


COMMANDS: dict[str, Callable[..., None]] = {
    "generate": generate,
    "chat": chat,
    "serve": serve_command,
    "route": route_command,
    "certify": certify_command,
    "doctor": doctor_command,
    "train": train_command,
    "merge": merge_command,
    "list": list_models,
    "pull": pull,
    "matrix": matrix,
    "version": version,
}
for _name, _command in COMMANDS.items():
    add(app, _name, _command, ServeCommand if _name == "serve" else Command)
app.add_typer(bench_app, name="bench")


def main() -> None:
    """Runs the command. Where the terminal cannot write a character, it shows a substitute instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    app(prog_name="outrider")
