"""The tables of docs/compatibility.md, made from the rules that the code goes by. Parts of the file between two marks
are written here; a test compares them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from outrider.compatibility import llm, sampling
from outrider.compatibility.rules import Refused, Rules

WORKS, NO_EFFECT, REFUSED = "works", "no effect", "refused"
HEAD = "| argument | here | |\n|---|---|---|\n"


def offline() -> str:
    """Everything about LLM, SamplingParams and what they are given."""
    methods = [(name, why) for why, names in _by_reason(llm.METHODS).items() for name in [_listed(names)]]
    parts = [
        ("LLM and AsyncLLM", table(llm.LLM, llm.OWN)),
        ("speculative_config", table(llm.SPECULATIVE, _SPECULATIVE)),
        ("SamplingParams", table(sampling.SAMPLING, sampling.FIELDS)),
        ("StructuredOutputsParams", table(sampling.STRUCTURED, sampling.STRUCTURED_FIELDS)),
        ("Prompts that are a dict", table(llm.PROMPT, {})),
        ("generate() and chat(), of LLM and AsyncLLM", table(llm.CALLS, _CALLS)),
        ("Methods", HEAD + _lines([*((f"`{name}`", WORKS, why) for name, why in _METHODS.items())]
                                  + [(names, REFUSED, why) for names, why in methods])),
    ]  # fmt: skip
    return "\n".join(f"### {title}\n\n{text}" for title, text in parts)


def table(rules: Rules, own: Mapping[str, str]) -> str:
    """All that `rules` say, after what `own` says of arguments that need none."""
    rows = [(f"`{name}`", WORKS, note) for name, note in [*own.items(), *rules.works.items()]]
    rows += [(_listed(group.names), NO_EFFECT, group.why) for group in rules.no_effect]
    rows += [(_refused(group), f"{REFUSED}, but for what asks for nothing", group.why) for group in rules.refused]
    return HEAD + _lines(rows)


def replaced(text: str, name: str, content: str) -> str:
    """A file's text with another content between the marks of `name`."""
    begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"the file has no {begin.strip()} ... {end}: put both where the tables belong")
    return f"{before}{begin}\n{content}\n{end}{after}"


PARTS: dict[str, Callable[[], str]] = {"offline": offline}  # what is written between which marks

_SPECULATIVE = {
    "method": "ngram, suffix, eagle, eagle3, p_eagle, dflash, mtp (deepseek_mtp, ...), draft_model: `outrider matrix`",
    "model": "a directory or a hub id",
    "num_speculative_tokens": "5 by default, 64 at most",
    **dict.fromkeys(("prompt_lookup_min", "prompt_lookup_max"), "2 and 8 by default"),
    "parallel_drafting": "",
    "suffix_decoding_max_tree_depth": "",
    "suffix_decoding_max_cached_requests": "",
    "suffix_decoding_max_spec_factor": "",
    "suffix_decoding_min_token_prob": "",
    "synthetic_acceptance_length": "for measuring",
    "synthetic_acceptance_rates": "for measuring",
}
_CALLS = {
    "prompts": "a text, token ids, a dict, or a list of those",
    "messages": "a conversation, or several",
    "sampling_params": "None: the model's own defaults",
    "request_id": "AsyncLLM's: for abort(); made up where it is left out",
    "use_tqdm": "False by default; True, or what makes a bar",
    "chat_template": "",
    "add_generation_prompt": "",
    "continue_final_message": "",
    "tools": "",
    "chat_template_kwargs": "",
}
_METHODS = {
    "generate": "",
    "chat": "",
    "get_tokenizer": "Outrider's own tokenizer: encode, decode, apply_chat_template, eos_token_id",
    "get_metrics": "Counter, Gauge, Vector and Histogram are in outrider.metrics",
    "get_default_sampling_params": "",
    "from_engine_args": "",
    "reset_prefix_cache": "",
}


def _refused(group: Refused) -> str:
    return ", ".join(f"`{name}`{_neutral(taken)}" for name, taken in group.names.items())


def _neutral(taken: Sequence[Any] | Any) -> str:
    if callable(taken) or not taken:
        return ""
    return f" ({', '.join(map(str, taken))})"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _lines(rows: Iterable[tuple[str, str, str]]) -> str:
    return "".join(f"| {names} | {here} | {note} |\n" for names, here, note in rows)


def _by_reason(reasons: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, why in reasons.items():
        found.setdefault(why, []).append(name)
    return found
