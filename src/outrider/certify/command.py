"""`outrider certify`: anyone can run the proof. Exit status 0 proven, 1 mismatch, 3 inconclusive."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated

import typer

from outrider.console import open_consoles, progress_bar
from outrider.options import AsJson, ChatTemplate, EngineOptions, ModelArgument, PromptFile
from outrider.startup import importing

MaxTokens = Annotated[int | None, typer.Option("--max-tokens", "-n", help="Tokens in each answer.", metavar="N")]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer prompts, seeds and tokens.")]


def certify_command(
    options: EngineOptions,
    target: ModelArgument = None,
    prompts: PromptFile = None,
    chat_template: ChatTemplate = None,
    max_tokens: MaxTokens = None,
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    """Prove that speculative output is what the target alone says.

    Token for token, however requests are batched. Exit status 0: proven. 1: an answer differs. 3: no difference, but
    the run proves nothing, and says why: nothing was accepted, say, or nothing rejected. Without a drafter, n-grams
    draft. The drafter always drafts, and drafts as much as possible: how much it helps is not the question.

    \b
    Examples:
      outrider certify --quick
      outrider certify DIRECTORY --draft DIRECTORY
      outrider certify MODEL.gguf --json > certificate.json
    """
    with importing():
        from outrider.bench.prompts import PromptChoice, read_prompts
        from outrider.certify.proof import certify_config
        from outrider.certify.questions import FULL, QUICK
        from outrider.certify.report import show_certificate
    effort = QUICK if quick else FULL
    if max_tokens is not None:
        effort = replace(effort, max_tokens=max_tokens)
    if options.no_draft:
        raise ValueError("--no-draft leaves nothing to prove: leave it out")
    config = options.named(target).config(default_method="ngram")
    choice = PromptChoice(read_prompts(prompts) if prompts is not None else None, chat_template)
    consoles = open_consoles()
    with progress_bar(consoles.about) as progress:
        certificate = certify_config(config, choice, effort, progress)
    if as_json:
        typer.echo(json.dumps(certificate.to_dict()))
    else:
        show_certificate(consoles.out, certificate)
    raise typer.Exit(certificate.exit_status)
