"""The forms in which a prompt can be given, in vLLM's names. Plain dicts of the same keys do as well."""

from __future__ import annotations

from typing import Any, Required, TypedDict


class _Options(TypedDict, total=False):
    multi_modal_data: dict[str, Any] | None  # {"image": a picture, or several}
    cache_salt: str  # pages of the cache, and what drafters learn, are shared with those of the same salt alone
    add_special_tokens: bool  # of a text: whether the tokenizer's own begin it


class TextPrompt(_Options):
    prompt: Required[str]


class TokensPrompt(_Options, total=False):
    prompt_token_ids: Required[list[int]]
    prompt: str  # the text they stand for, for the output


PromptType = str | list[int] | TextPrompt | TokensPrompt
