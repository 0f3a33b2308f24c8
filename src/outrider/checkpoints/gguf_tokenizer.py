"""The tokenizer inside a GGUF file, rebuilt from its metadata with the `tokenizers` library.
Two models exist: "gpt2" (byte-level BPE with merges) and "llama" (sentencepiece BPE, with scores instead of merges)."""

import gc
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from outrider.checkpoints.gguf_file import HeaderReader, Metadata
from outrider.tokenizer import SPECIAL_TOKEN_NAMES, Tokenizer, surround

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5  # the kinds in tokenizer.ggml.token_type
GGUF_NAMES = {"unk": "unknown", "sep": "seperator", "pad": "padding"}  # where a token's key is not its usual name

WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CASELESS_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Splitting:
    """How a family cuts text into words before byte pairs are merged inside them."""

    patterns: tuple[str, ...]  # each cuts what the one before it left
    normalise: bool = False  # NFC
    whole_words: bool = False  # a word that is a token needs no merges
    add_bos: bool = False  # unless the file says otherwise


SPLITTINGS = {
    "default": Splitting((r"[\p{P}\$\+<=>\^~\|]+", WORDS, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": Splitting((WORDS,)),
    "smollm": Splitting((r"\p{N}", WORDS)),
    "starcoder": Splitting((r"\p{N}", WORDS)),
    "qwen2": Splitting((CASELESS_WORDS % r"\p{N}",), normalise=True),
    "llama-bpe": Splitting((CASELESS_WORDS % r"\p{N}{1,3}",), whole_words=True, add_bos=True),
}


@dataclass(frozen=True)
class GgufVocabulary:
    """What both models share."""

    metadata: Metadata
    tokens: list[str]
    kinds: list[int]
    ids: dict[str, int]

    def special(self, name: str) -> str | None:
        """The text of "bos", "eos" and so on."""
        key = f"tokenizer.ggml.{GGUF_NAMES.get(name, name)}_token_id"
        id = self.metadata.get(key, int, None)
        if id is None:
            return None
        if not 0 <= id < len(self.tokens):
            raise ValueError(f"{self.metadata.path}: {key!r} is {id}, which no token has; convert the model again")
        return self.tokens[id]

    def of_kind(self, *kinds: int) -> list[str]:
        return [token for token, id in self.ids.items() if self.kinds[id] in kinds]


def tokenizer_at(path: Path) -> Tokenizer | None:
    """The tokenizer of a checkpoint, a directory or a GGUF file, without the rest of it; None where it has none."""
    if path.is_dir():
        return Tokenizer.from_directory(path)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        metadata, _ = HeaderReader(memory, path).read()
        return build_tokenizer(metadata)


def build_tokenizer(metadata: Metadata) -> Tokenizer | None:
    """The tokenizer of a GGUF file, or None where it has none."""
    model = metadata.get("tokenizer.ggml.model", str, "none")
    if model in ("none", "no_vocab"):
        return None
    if model not in MODELS:
        known = ", ".join(MODELS)
        raise ValueError(f"{metadata.path}: the tokenizer {model!r} cannot be read, only {known}; use safetensors")
    backend, specials = _backend(model, metadata)  # the vocabulary's texts are gone before anything is made to stay
    gc.collect()  # of a hundred thousand merges Python would keep two thousand tuples, and whatever lies around each
    return Tokenizer(
        backend,
        special_tokens={name: token for name, token in specials.items() if token is not None},
        templates=_read_templates(metadata),
        origin=str(metadata.path),
    )


def _backend(model: str, metadata: Metadata) -> tuple[tokenizers.Tokenizer, dict[str, str | None]]:
    """And the texts of the special tokens."""
    vocabulary = _read_vocabulary(metadata)
    backend, add_bos = MODELS[model](vocabulary)
    bos = vocabulary.special("bos") if metadata.get("tokenizer.ggml.add_bos_token", bool, add_bos) else None
    eos = vocabulary.special("eos") if metadata.get("tokenizer.ggml.add_eos_token", bool, False) else None
    surround(backend, bos, eos)
    return backend, {name: vocabulary.special(name.removesuffix("_token")) for name in SPECIAL_TOKEN_NAMES}


def _read_vocabulary(metadata: Metadata) -> GgufVocabulary:
    tokens = _texts(metadata, "tokenizer.ggml.tokens")
    kinds = metadata.get("tokenizer.ggml.token_type", list, [NORMAL] * len(tokens))
    if len(kinds) != len(tokens):
        raise ValueError(f"{metadata.path}: its tokens and token types do not match; convert the model again")
    ids: dict[str, int] = {}
    for id, token in enumerate(tokens):
        # Converters fill a vocabulary up to the size of the embedding with such tokens; the model never had them.
        if not (kinds[id] in (UNUSED, USER_DEFINED) and token == f"[PAD{id}]"):
            ids.setdefault(token, id)
    return GgufVocabulary(metadata, tokens, kinds, ids)


def _texts(metadata: Metadata, key: str) -> list[str]:
    texts = metadata.get(key, list)
    if not all(type(text) is str for text in texts):
        raise ValueError(f"{metadata.path}: {key!r} holds other values than texts; convert the model again")
    return texts


def _read_templates(metadata: Metadata) -> dict[str, str]:
    key = "tokenizer.chat_template"
    named = [name for name in metadata.values if name.startswith(f"{key}.")]
    templates = {name.removeprefix(f"{key}."): metadata.get(name, str) for name in named}
    return templates | ({"default": metadata.get(key, str)} if key in metadata.values else {})


def _add_tokens(backend: tokenizers.Tokenizer, vocabulary: GgufVocabulary, *, normalised: bool = False) -> None:
    """Tokens that are found in a text as they stand, before any splitting; plain ones maybe in the normalised text."""
    special, plain = vocabulary.of_kind(CONTROL, UNKNOWN), vocabulary.of_kind(USER_DEFINED)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, special=False, normalized=normalised) for token in plain])


def _byte_level(vocabulary: GgufVocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    """The model "gpt2", and whether it puts bos before a text by default."""
    metadata = vocabulary.metadata
    name = metadata.get("tokenizer.ggml.pre", str, "default")
    if name not in SPLITTINGS:
        known = ", ".join(SPLITTINGS)
        raise ValueError(f"{metadata.path}: pre-tokenizer {name!r} is unknown, only {known}; use safetensors")
    splitting = SPLITTINGS[name]
    merges = [_split_merge(merge) for merge in _texts(metadata, "tokenizer.ggml.merges")]
    backend = _byte_pair_backend(vocabulary, merges, ignore_merges=splitting.whole_words)
    if splitting.normalise:
        backend.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in splitting.patterns]
    bytes_as_characters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, bytes_as_characters])
    backend.decoder = decoders.ByteLevel()
    _add_tokens(backend, vocabulary)
    return backend, splitting.add_bos


def _sentencepiece(vocabulary: GgufVocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    """The model "llama", and whether it puts bos before a text by default."""
    merges = _merges_from_scores(vocabulary)
    unknown = vocabulary.special("unk")
    backend = _byte_pair_backend(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    spaces = normalizers.Replace(" ", "▁")
    text = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    add_prefix = vocabulary.metadata.get("tokenizer.ggml.add_space_prefix", bool, True)
    if add_prefix:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        text.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = spaces
    backend.decoder = decoders.Sequence(text)
    # Gemma's runs of spaces may be written with either kind of space; with a prefix, every token would begin with it.
    _add_tokens(backend, vocabulary, normalised=not add_prefix)
    return backend, True


MODELS: dict[str, Callable[[GgufVocabulary], tuple[tokenizers.Tokenizer, bool]]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
}


def _byte_pair_backend(
    vocabulary: GgufVocabulary, merges: list[tuple[str, str]], **options: Any
) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(models.BPE(vocabulary.ids, merges, **options))
    except Exception as error:  # the library raises a bare Exception, such as for a merge of unknown tokens
        path = vocabulary.metadata.path
        raise ValueError(f"{path}: its tokenizer is damaged ({error}); convert the model again") from error


def _split_merge(merge: str) -> tuple[str, str]:
    """A merge is written as two tokens with a space between."""
    left, _, right = merge.partition(" ")
    return left, right


def _merges_from_scores(vocabulary: GgufVocabulary) -> list[tuple[str, str]]:
    """Sentencepiece joins the neighbours that make the best-scored piece: all ways to make each piece, best first."""
    metadata, ids = vocabulary.metadata, vocabulary.ids
    scores = metadata.get("tokenizer.ggml.scores", list)
    if len(scores) != len(vocabulary.tokens) or not all(type(score) is float for score in scores):
        raise ValueError(f"{metadata.path}: its tokens and scores do not match; convert the model again")
    merges: list[tuple[str, str]] = []
    for piece in sorted(vocabulary.of_kind(NORMAL), key=lambda piece: -scores[ids[piece]]):
        cuts = [cut for cut in range(1, len(piece)) if piece[:cut] in ids and piece[cut:] in ids]
        merges += [(piece[:cut], piece[cut:]) for cut in cuts]
    return merges
