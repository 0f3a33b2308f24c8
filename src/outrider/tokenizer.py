"""Text to token ids and back: a vocabulary with its text rules, and the chat templates that came with it.
Knows nothing of models or requests; what it reads from a checkpoint is data; templates run elsewhere."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, processors

from outrider.chat_template import ChatOptions, ChatTemplates, Messages

LONG_TEXT = 2048  # characters or tokens: about a millisecond
SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); download the file again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, not a {type(content).__name__}; download the file again")
    return content


class Tokenizer:
    """A vocabulary with its text rules, and the chat templates that came with it."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        templates: Mapping[str, str] | None = None,
        origin: str = "this tokenizer",
    ) -> None:
        self._backend = backend
        self._texts: dict[int, str] = {}  # of tokens, as far as somebody has asked
        self._bytes: dict[int, bytes] = {}  # the same
        self._special_tokens = dict(special_tokens or {})  # "bos_token" -> "<s>", as templates see them
        self._chat = ChatTemplates(templates or {}, self._special_tokens, origin)
        self._special_ids = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        self.is_byte_level = isinstance(backend.decoder, decoders.ByteLevel)
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @classmethod
    def from_directory(cls, path: str | Path) -> "Tokenizer | None":
        """The tokenizer of a checkpoint directory, or None where it holds no tokenizer.json."""
        path = Path(path)
        file = path / "tokenizer.json"
        if not file.is_file():
            return None
        config = _read_if_present(path / "tokenizer_config.json")
        special_tokens = _special_tokens(_read_if_present(path / "special_tokens_map.json") | config)
        backend = _read_backend(file)
        _add_missing_tokens(backend, config, special_tokens, file)
        if not _places_tokens(backend):  # then tokenizer_config.json decides, as in DeepSeek's checkpoints
            bos = special_tokens.get("bos_token") if config.get("add_bos_token") else None
            eos = special_tokens.get("eos_token") if config.get("add_eos_token") else None
            surround(backend, bos, eos)
        return cls(backend, special_tokens=special_tokens, templates=_read_templates(path, config), origin=str(path))

    @property
    def special_tokens(self) -> dict[str, str]:
        """The special tokens as templates see them: "bos_token" -> "<s>"."""
        return dict(self._special_tokens)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._chat.sources)

    def template_text(self, *, tools: bool = False) -> str | None:
        """The source of the chat template that is used with or without tools; None where there is none."""
        sources = self._chat.sources
        return sources.get("tool_use" if tools and "tool_use" in sources else "default")

    def use_template(self, source: str) -> None:
        """Uses this chat template instead of those that the tokenizer came with."""
        self._chat = ChatTemplates({"default": source}, self._special_tokens, self._chat.origin)

    def special_id(self, text: str) -> int | None:
        """The special token that is written so."""
        id = self._backend.token_to_id(text)
        return id if id in self._special_ids else None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if _LONE_SURROGATE.search(text):
            raise ValueError("the text holds half of a surrogate pair, which has no encoding; send valid Unicode")
        try:
            if len(text) < LONG_TEXT:
                return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
            # The same ids. This call lets other threads run meanwhile; encode() stops all of them until it is done.
            return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except BaseException as error:  # the library's way to give up is none that anybody would catch
            if type(error).__name__ != "PanicException":
                raise
            raise ValueError("the tokenizer cannot read this text: shorten it") from None

    @cached_property
    def longest(self) -> int:
        """Characters that one token can stand for, at most."""
        return max((len(self.token_bytes(id)) for id in range(self.vocab_size)), default=1)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if len(ids) < LONG_TEXT:
            return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return self._backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]  # see encode()

    def token(self, id: int) -> str:
        """The text of one token, leading space included. Part of a character shows as U+FFFD, an unused id as ""."""
        text = self._texts.get(id)
        if text is None:
            text = self._texts[id] = self.token_bytes(id).decode("utf-8", errors="replace")
        return text

    def token_bytes(self, id: int) -> bytes:
        """What one token adds to the text, as bytes: a token may be part of a character."""
        known = self._bytes.get(id)
        if known is None:
            known = self._bytes[id] = self._spelt(id)
        return known

    def _spelt(self, id: int) -> bytes:
        token = self._backend.id_to_token(id)
        if token is None:
            return b""
        if self.is_byte_level:
            return _byte_level_bytes(token)
        if byte := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(byte[1], 16)])
        return token.replace("▁", " ").encode()

    def is_byte_token(self, id: int) -> bool:
        """Whether this token stands for a single byte, as <0x0A> does in sentencepiece vocabularies."""
        return _BYTE_TOKEN.fullmatch(self._backend.id_to_token(id) or "") is not None

    def is_silent(self, id: int, *, skip_special_tokens: bool) -> bool:
        """Whether decode() passes over this id: a skipped special token, or an id that the vocabulary does not use."""
        return (skip_special_tokens and id in self._special_ids) or self._backend.id_to_token(id) is None

    def chat(self, messages: Messages, options: ChatOptions | None = None) -> str:
        """The prompt for a conversation. It holds its own special tokens: encode it with add_special_tokens=False."""
        return self._chat.render(messages, options or ChatOptions())

    def apply_chat_template(
        self,
        conversation: Messages,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **template_kwargs: Any,
    ) -> str | list[int]:
        """chat() in the names and with the defaults of transformers: token ids, or text."""
        options = ChatOptions(tools, chat_template, add_generation_prompt, continue_final_message, template_kwargs)
        text = self.chat(conversation, options)
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def fingerprint(self) -> str:
        """A hash that is the same for two tokenizers whose ids mean the same tokens."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        vocabulary = sorted((id, token) for token, id in self._backend.get_vocab(with_added_tokens=True).items())
        return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()

    def _special_id(self, name: str) -> int | None:
        token = self._special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)


def surround(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Makes encode() put these tokens around a text (None for neither)."""
    used = [token for token in (bos, eos) if token is not None]
    missing = [token for token in used if backend.token_to_id(token) is None]
    if missing:
        raise ValueError(f"the tokenizer adds {missing[0]!r} to texts but has no such token; correct its bos and eos")
    pieces = ([bos] if bos is not None else []) + ["$A"] + ([eos] if eos is not None else [])
    backend.post_processor = processors.TemplateProcessing(
        single=pieces, special_tokens=[(token, backend.token_to_id(token)) for token in dict.fromkeys(used)]
    )


def _places_tokens(backend: tokenizers.Tokenizer) -> bool:
    """Whether tokenizer.json itself says which tokens go around a text."""
    return backend.post_processor is not None and b"TemplateProcessing" in backend.post_processor.__getstate__()


def _read_if_present(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _read_backend(file: Path) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises a bare Exception
        raise ValueError(f"{file} is not a tokenizer ({error}); download the file again") from error
    backend.no_truncation()  # limits left over from training
    backend.no_padding()
    return backend


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name; a value is the text itself or an object that holds it."""
    values = {name: config[name] for name in SPECIAL_TOKEN_NAMES if config.get(name) is not None}
    return {name: value["content"] if isinstance(value, dict) else str(value) for name, value in values.items()}


def _add_missing_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, str], file: Path
) -> None:
    """Tokens that only tokenizer_config.json declares, or that it calls special and tokenizer.json does not."""
    declared = {int(id): entry for id, entry in config.get("added_tokens_decoder", {}).items()}
    for id, entry in sorted(declared.items()):
        if backend.token_to_id(entry["content"]) is not None:
            continue
        backend.add_tokens([AddedToken(**{k: v for k, v in entry.items() if not k.startswith("__")})])
        if backend.token_to_id(entry["content"]) != id:
            raise ValueError(f"{file} cannot give {entry['content']!r} its id {id}; save the tokenizer again")
    already = {token.content for token in backend.get_added_tokens_decoder().values()}
    named = [token for token in special_tokens.values() if backend.token_to_id(token) is not None]
    backend.add_special_tokens([AddedToken(token, special=True) for token in named if token not in already])


def _read_templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    stored = config.get("chat_template") or {}
    if isinstance(stored, str):
        stored = {"default": stored}
    elif isinstance(stored, list):
        stored = {entry["name"]: entry["template"] for entry in stored}
    templates = dict(stored)
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = file.read_text(encoding="utf-8")
    if (path / "chat_template.jinja").is_file():
        templates["default"] = (path / "chat_template.jinja").read_text(encoding="utf-8")
    return templates


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """How byte-level vocabularies write bytes: printable characters as they are, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def _byte_level_bytes(token: str) -> bytes:
    alphabet = _byte_alphabet()
    if all(character in alphabet for character in token):
        return bytes(alphabet[character] for character in token)
    return token.encode()  # an added token, kept as plain text
