"""The outrider command: generate, chat, serve, certify, doctor, bench, matrix, version.
A ValueError is the user's to mend and becomes one line on standard error with exit status 2; --debug shows it all."""

from __future__ import annotations

import io
import json
import secrets
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from outrider import __version__
from outrider.bench.options import Threads, speculative_from
from outrider.config import SpeculativeConfig
from outrider.console import (
    Consoles,
    StreamedText,
    loading,
    open_consoles,
    show_card,
    show_comparison,
    show_error,
    show_matrix,
    show_memory,
    show_note,
)
from outrider.conversation import Conversation, converse
from outrider.llm import LLM, Prompt
from outrider.matrix import as_json as matrix_json
from outrider.matrix import support_matrix
from outrider.measure import NUM_TIMED_RUNS, Comparison, Question, Run, compare, method_of, run
from outrider.sampling_params import SamplingParams

EXIT_DIFFERENT, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130
ABOUT = """LLM inference with a drafter that rides ahead. What comes out is what the target alone would have said.

\b
Examples:
  outrider chat
  outrider generate "Why is the sky blue?" --compare
  outrider generate --help
"""


class Commands(TyperGroup):
    """All sub-commands, whoever wrote them, report errors in the same way."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # the reader of a pipe has seen enough
            raise
        except (ValueError, OSError) as error:
            if ctx.meta.get("debug"):
                raise
            show_error(open_consoles(no_color=ctx.meta.get("no_color", False)).about, error)
            raise typer.Exit(EXIT_USAGE) from error


app = typer.Typer(
    cls=Commands,
    help=ABOUT,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


# options


def _remember(ctx: typer.Context, parameter: typer.CallbackParam, value: bool) -> bool:
    """Kept where Commands finds it, also when it comes after the sub-command's name."""
    if value:
        ctx.meta[str(parameter.name)] = True
    return value


def _option(panel: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel=panel, **settings)


_MODEL, _SAMPLING, _OUTPUT = "Model", "Sampling", "Output"
_MODEL_HELP = "Target: a directory, a .gguf file or a hub id. Without it, the embedded model."
_DRAFT_HELP = "Drafter: a directory or a hub id, or the word ngram."
_NO_DRAFT_HELP = "Decode plainly, without the embedded drafter."
_CONFIG_HELP = "The drafter with its settings, in vLLM's names."
_SEED_HELP = "The same seed gives the same tokens, drafted or not."
Model = Annotated[str | None, _option(_MODEL, "--model", "-m", metavar="M", help=_MODEL_HELP)]
Draft = Annotated[str | None, _option(_MODEL, "--draft", "-d", metavar="D", help=_DRAFT_HELP)]
NoDraft = Annotated[bool, _option(_MODEL, "--no-draft", help=_NO_DRAFT_HELP)]
SpeculativeJson = Annotated[str | None, _option(_MODEL, "--speculative-config", metavar="JSON", help=_CONFIG_HELP)]
NumSpeculativeTokens = Annotated[
    int | None, _option(_MODEL, "--num-speculative-tokens", "-k", metavar="K", help="Tokens to draft in a round.")
]
Dtype = Annotated[str, _option(_MODEL, "--dtype", metavar="NAME", help="float32, bfloat16, float16 or auto.")]
Device = Annotated[str, _option(_MODEL, "--device", metavar="NAME", help="cpu, cuda, cuda:N or auto.")]
MaxModelLen = Annotated[
    int | None, _option(_MODEL, "--max-model-len", metavar="N", help="Longest context, prompt and answer together.")
]
MaxTokens = Annotated[int, _option(_SAMPLING, "--max-tokens", "-n", metavar="N", help="Longest answer.")]
Temperature = Annotated[float, _option(_SAMPLING, "--temperature", "-t", metavar="T", help="0 is greedy.")]
Seed = Annotated[int | None, _option(_SAMPLING, "--seed", metavar="S", help=_SEED_HELP)]
TopP = Annotated[float, _option(_SAMPLING, "--top-p", metavar="P", help="From the likeliest tokens of this mass.")]
TopK = Annotated[int, _option(_SAMPLING, "--top-k", metavar="K", help="From this many tokens; 0: from all.")]
NoColor = Annotated[bool, _option(_OUTPUT, "--no-color", help="Plain text, as with NO_COLOR set.", callback=_remember)]
Debug = Annotated[bool, _option(_OUTPUT, "--debug", help="Show the traceback of an error.", callback=_remember)]
# of generate alone
_CHAT_HELP = "Put the prompt through the chat template; by default, if there is one."
_COMPARE_HELP = "Decode plainly too: same tokens, how much faster? Status 1 if not the same."
PromptArgument = Annotated[
    str | None, typer.Argument(help="The prompt; - reads it from standard input.", metavar="PROMPT")
]
PromptFile = Annotated[
    Path | None, typer.Option("--prompt-file", "-f", help="A file that holds the prompt.", exists=True, dir_okay=False)
]
ImageFiles = Annotated[
    list[Path] | None,
    typer.Option("--image", "-i", help="An image to ask about; again for more.", exists=True, dir_okay=False),
]
ChatTemplate = Annotated[bool | None, typer.Option("--chat/--no-chat", help=_CHAT_HELP)]
ComparePlain = Annotated[bool, _option(_OUTPUT, "--compare", help=_COMPARE_HELP)]
AsJson = Annotated[bool, _option(_OUTPUT, "--json", help="Print one JSON object and nothing else.")]
# of chat alone
System = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="What the model is told first.")]


@dataclass(frozen=True)
class ModelOptions:
    """What to load."""

    model: str | None
    speculative: SpeculativeConfig | None
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None

    def load(self, consoles: Consoles, *, prefix_caching: bool = True) -> LLM:
        """For one request at a time: the cache need not be larger than that."""
        with loading(consoles.about) as progress:
            return LLM(
                self.model,
                self.speculative,
                dtype=self.dtype,
                device=self.device,
                max_model_len=self.max_model_len,
                max_num_seqs=1,
                enable_prefix_caching=prefix_caching,
                progress=progress,
            )


def resolve_speculation(
    model: str | None, draft: str | None, no_draft: bool, speculative_config: str | None, num_tokens: int | None
) -> SpeculativeConfig | None:
    """Which drafter the options ask for; with the embedded target, its own unless told otherwise."""
    options = {"--draft": draft, "--speculative-config": speculative_config, "--no-draft": no_draft or None}
    given = [name for name, value in options.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} contradict each other: give one of them")
    if no_draft:
        return None
    if num_tokens is not None and model is not None and not given:
        raise ValueError("--num-speculative-tokens needs a drafter: add --draft, or leave it out")
    return speculative_from(model, draft, speculative_config, num_tokens)


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The newline that ends a file or a pipe is not part of the prompt."""
    if (prompt is None) == (prompt_file is None):
        raise ValueError("give one prompt: PROMPT, - to read it from standard input, or --prompt-file FILE")
    if prompt_file is not None:
        return prompt_file.read_text(encoding="utf-8").removesuffix("\n")
    assert prompt is not None
    return sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt


@app.command()
def generate(
    prompt: PromptArgument = None,
    prompt_file: PromptFile = None,
    image: ImageFiles = None,
    chat_template: ChatTemplate = None,
    model: Model = None,
    draft: Draft = None,
    no_draft: NoDraft = False,
    speculative_config: SpeculativeJson = None,
    num_speculative_tokens: NumSpeculativeTokens = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    max_model_len: MaxModelLen = None,
    threads: Threads = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    compare_plain: ComparePlain = False,
    as_json: AsJson = False,
    no_color: NoColor = False,
    debug: Debug = False,
) -> None:
    """Continue a prompt, or answer it. Tokens that the drafter guessed are coloured by their place in the draft.

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
    speculative = resolve_speculation(model, draft, no_draft, speculative_config, num_speculative_tokens)
    if compare_plain and speculative is None:
        raise ValueError("--compare needs a drafter to compare plain decoding with: add --draft")
    options = ModelOptions(model, speculative, dtype, device, max_model_len)
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed if seed is not None else secrets.randbits(32),
        top_p=top_p,
        top_k=top_k,
    )
    text = read_prompt(prompt, prompt_file)
    # A comparison computes every prompt afresh: found in the cache, it would flatter the drafter.
    with options.load(consoles, prefix_caching=not compare_plain) as llm:
        show_memory(consoles.about, llm.budget)
        question = Question(_wrap_prompt(llm, text, image or [], chat_template), params)
        first = _run_and_show(llm, question, None if as_json else consoles)
        comparison = None
        if compare_plain and not first.interrupted:
            comparison = _compare_with_plain(options, consoles, llm, question, first)
        result = comparison.drafted if comparison is not None else first
        if as_json:
            typer.echo(json.dumps(_report(result, comparison, llm, model)))
        else:
            show_card(consoles.about, result, method_of(llm))
            if comparison is not None:
                show_comparison(consoles.about, comparison)
    if result.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    if comparison is not None and comparison.difference is not None:
        raise typer.Exit(EXIT_DIFFERENT)


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
    if consoles is None:
        return run(llm, question)
    shown = StreamedText(consoles.out)
    result = run(llm, question, shown.show)
    shown.finish()
    return result


def _compare_with_plain(
    options: ModelOptions, consoles: Consoles, drafted: LLM, question: Question, first: Run
) -> Comparison:
    """Against an engine without a drafter: one that only skips drafting would still do part of the drafter's work."""
    alone = replace(options, speculative=None, max_model_len=drafted.max_model_len)
    with alone.load(consoles, prefix_caching=False) as plain:
        if consoles.about.is_terminal:  # no spinner: its thread would take time from what is being timed
            show_note(consoles.about, f"timing both, {NUM_TIMED_RUNS} runs each")
        return compare(drafted, plain, question, first)


def _report(result: Run, comparison: Comparison | None, llm: LLM, model: str | None) -> dict[str, Any]:
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


@app.command()
def chat(
    system: System = None,
    model: Model = None,
    draft: Draft = None,
    no_draft: NoDraft = False,
    speculative_config: SpeculativeJson = None,
    num_speculative_tokens: NumSpeculativeTokens = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    max_model_len: MaxModelLen = None,
    threads: Threads = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
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
      outrider chat --model org/name --draft org/name-eagle3 --temperature 0.7
      printf 'Hello\\nAnd now?\\n' | outrider chat
    """
    consoles = open_consoles(no_color=no_color)
    speculative = resolve_speculation(model, draft, no_draft, speculative_config, num_speculative_tokens)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed, top_p=top_p, top_k=top_k)
    with ModelOptions(model, speculative, dtype, device, max_model_len).load(consoles) as llm:
        show_memory(consoles.about, llm.budget)
        converse(Conversation(llm, params, consoles, system))


@app.command()
def matrix(as_json: AsJson = False, no_color: NoColor = False) -> None:
    """Which targets work with which drafters.

    A target goes by the architecture in its config.json, a drafter by its method in --speculative-config.

    \b
    Examples:
      outrider matrix
      outrider matrix --json | jq '.matrix.Gemma3ForCausalLM'
    """
    cells = support_matrix()
    if as_json:
        typer.echo(json.dumps(matrix_json(cells)))
    else:
        show_matrix(open_consoles(no_color=no_color).out, cells)


@app.command()
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
    debug: Debug = False,
) -> None:
    pass


def main() -> None:
    """The entry point. Where the terminal cannot write a character, it shows a substitute instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    app(prog_name="outrider")


from outrider.bench.commands import bench_app  # noqa: E402  (these come after the app that they join)
from outrider.certify import certify_command  # noqa: E402
from outrider.doctor import doctor_command  # noqa: E402
from outrider.server import serve_command  # noqa: E402

app.command("certify")(certify_command)
app.command("doctor")(doctor_command)
app.command("serve")(serve_command)
app.add_typer(bench_app, name="bench")
