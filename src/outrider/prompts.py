"""Prompts as token ids, and what a request asks for in text as token ids too, checked for one vocabulary and one
context. Text and numbers alone: no model is needed, and no torch."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from outrider.chat_template import ChatOptions, Messages, pictures_of
from outrider.compatibility.llm import PROMPT
from outrider.sampling_params import SamplingParams
from outrider.tokenizer import Tokenizer

Prompt = str | Mapping[str, Any] | Sequence[int]
TAIL = 8  # tokens of a prompt on which the spelling of what follows may depend


class ContextOverflowError(ValueError):
    """A prompt that leaves no room for an answer."""


class Prompts:
    """Turns prompts into checked token ids for one model. `origin` is what errors call it."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, max_model_len: int, origin: str) -> None:
        self.tokenizer, self.vocab_size, self.max_model_len = tokenizer, vocab_size, max_model_len
        self._origin = origin

    def of_chat(self, messages: Messages, options: ChatOptions | None = None) -> dict[str, Any]:
        """A conversation as a prompt, through the checkpoint's chat template."""
        tokenizer = self.tokenizer_for("a chat")
        plain, pictures = pictures_of(messages)
        text = tokenizer.chat(plain, options)
        self.check_text(text, "the conversation")
        if pictures:
            return {"prompt": text, "multi_modal_data": {"image": pictures}, "add_special_tokens": False}
        return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}

    def ids(self, prompt: Prompt, name: str) -> list[int]:
        """The tokens of a prompt without images, not yet checked."""
        if isinstance(prompt, Mapping):
            if not prompt.keys() & {"prompt", "prompt_token_ids"}:
                raise ValueError(f'{name} is a mapping without "prompt" or "prompt_token_ids": {sorted(prompt)}')
            PROMPT.settle(prompt, name)
            if prompt.get("prompt_token_ids") is not None:
                return list(prompt["prompt_token_ids"])
            if isinstance(prompt["prompt"], str) and not prompt.get("add_special_tokens", True):
                return self.tokenizer_for(name).encode(prompt["prompt"], add_special_tokens=False)
            return self.ids(prompt["prompt"], name)
        if not isinstance(prompt, str):
            return list(prompt)
        self.check_text(prompt, name)
        return self.tokenizer_for(name).encode(prompt)

    def check_text(self, text: str, name: str) -> None:
        """That it is not far too long, before it is encoded: that takes time and memory."""
        if len(text) > self.max_model_len and self.tokenizer is not None:
            most = self.max_model_len * self.tokenizer.longest
            if len(text) > most:
                raise ContextOverflowError(
                    f"{name} has {len(text)} characters; this model's maximum context length is {self.max_model_len} "
                    f"tokens, which hold at most {most}: shorten it, or raise max_model_len"
                )

    def check(self, ids: Sequence[int], name: str) -> None:
        """Raises ValueError for a prompt without tokens, or one that leaves no room for an answer."""
        if len(ids) >= self.max_model_len:
            raise ContextOverflowError(
                f"{name} has {len(ids)} tokens; this model's maximum context length is {self.max_model_len} tokens, of "
                "which one is left for the answer at least: shorten it, or raise max_model_len"
            )
        self.check_ids(ids, name)

    def check_ids(self, ids: Sequence[int], name: str) -> None:
        if not ids:
            raise ValueError(f"{name} is empty: give at least one token")
        if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < self.vocab_size:  # quick for the longest
            return
        for token in ids:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self.vocab_size:
                raise ValueError(f"{name} holds {token!r}, which is no token id: ids are 0..{self.vocab_size - 1}")

    def settled(self, params: SamplingParams, ids: Sequence[int]) -> SamplingParams:
        """What a request asks for after this prompt, checked, with everything that was given as text in tokens. A copy:
        whoever gave the params may change them."""
        params = params.clone()
        if params.structured_outputs is not None:
            params = replace(params, guided=params.structured_outputs.guided(), structured_outputs=None)
        if params.stop_strings:
            self.tokenizer_for("a stop string")
        given = [*(params.logit_bias or {}), *(params.allowed_token_ids or []), *params.stop_token_ids]
        self.check_ids(given or [0], "logit_bias, allowed_token_ids or stop_token_ids")
        if params.allowed_token_ids is not None:  # each id once, and as the engine takes it up soonest
            params = replace(params, allowed_token_ids=array("q", sorted(set(params.allowed_token_ids))))
        if params.bad_words:
            params = replace(params, bad_words=self._bad_words(params))
        if params.prediction and params.num_speculative_tokens != 0:
            params = replace(params, prediction=self._predicted(params.prediction, ids))
        return params

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Every way a bad word may be spelt in tokens: at the start of a text, and after a space."""
        words: list[list[int]] = []
        for word in params.bad_words:
            if not isinstance(word, str):
                self.check_ids(list(word), "bad_words")
                words.append(list(word))
                continue
            tokenizer = self.tokenizer_for("a bad word given as text")
            for text in (word, " " + word.lstrip()):
                ids = tokenizer.encode(text, add_special_tokens=False)
                if ids and ids not in words:
                    words.append(ids)
        return words

    def _predicted(self, given: str | Sequence[int], prompt: Sequence[int]) -> list[int]:
        """The tokens in which the target would write what is predicted, right after the prompt."""
        if isinstance(given, str):
            return tokens_after(prompt, given, self.tokenizer_for("a prediction given as text"))
        self.check_ids(given, "prediction")
        return list(given)

    def tokenizer_for(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(f"{what} needs a tokenizer, and {self._origin} has none: give prompt_token_ids instead")
        return self.tokenizer


def salted(params: SamplingParams, prompt: Prompt) -> SamplingParams:
    """A prompt's salt is whose cache and drafts it shares, where the params name nobody."""
    salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
    return params if salt is None or params.tenant is not None else replace(params, tenant=salt)


def tokens_after(prompt: Sequence[int], text: str, tokenizer: Tokenizer) -> list[int]:
    """A text as it is spelt right after a prompt: some tokenizers begin a text of its own with a space."""
    tail = tokenizer.decode(prompt[-TAIL:], skip_special_tokens=False)
    before = tokenizer.encode(tail, add_special_tokens=False)
    both = tokenizer.encode(tail + text, add_special_tokens=False)
    if both[: len(before)] == before:
        return both[len(before) :]
    return tokenizer.encode(text, add_special_tokens=False)  # the two melt into one token, which cannot be said now
