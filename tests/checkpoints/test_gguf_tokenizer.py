"""Tokenizers rebuilt from GGUF metadata, against the tokenizers that the metadata was taken from
and against sentencepiece's merging written out the slow way."""

import json
import mmap
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from gguf_files import add_embedding, finish, minimal_writer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from outrider.chat_template import ChatOptions
from outrider.checkpoints.checkpoint import load_tokenizer, open_checkpoint
from outrider.checkpoints.gguf_file import HeaderReader, Metadata
from outrider.checkpoints.gguf_tokenizer import build_tokenizer, tokenizer_at
from outrider.detokenizer import Detokenizer
from outrider.pair import DEFAULT_DIRECTORY
from outrider.tokenizer import Tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog, again and again",
    "it's 12345 o'clock; WE'LL see, they're naïve: déjà vu in größeren Straßen",
    "你好，世界。今天天气很好 😀 👍🏽",
    "def add(a, b):\n    return a + b\n\n\n  # x == 1000000",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>"]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def build(values: dict[str, Any]) -> Tokenizer:
    tokenizer = build_tokenizer(Metadata(values, Path("model.gguf")))
    assert tokenizer is not None
    return tokenizer


# Byte-level


def trained(splitter: pre_tokenizers.PreTokenizer, vocab_size: int = 420) -> dict[str, Any]:
    """The vocabulary and merges of a byte-level model."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = splitter
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return json.loads(backend.to_str())["model"]


def splitter_for(pre: str) -> pre_tokenizers.PreTokenizer:
    """How the original tokenizers split."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre == "gpt-2":
        return byte_level
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    module = pytest.importorskip("transformers.models.qwen2.tokenization_qwen2")
    digits = r"\p{N}" if pre == "qwen2" else r"\p{N}{1,3}"
    pattern = module.PRETOKENIZE_REGEX.replace(r"|\p{N}|", f"|{digits}|")
    split = pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def byte_level_metadata(model: dict[str, Any], pre: str) -> dict[str, Any]:
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, "<think>"],
        "tokenizer.ggml.token_type": [CONTROL if token in SPECIAL else NORMAL for token in tokens] + [USER_DEFINED],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}",
        "tokenizer.chat_template.tool_use": "with tools",
    }


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "qwen2", "llama-bpe"])
def test_byte_level_tokenizers(pre: str) -> None:
    model = trained(splitter_for(pre))
    merges = [tuple(merge) for merge in model["merges"]]
    reference = tokenizers.Tokenizer(models.BPE(model["vocab"], merges, ignore_merges=pre == "llama-bpe"))
    reference.pre_tokenizer = splitter_for(pre)
    reference.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        reference.normalizer = normalizers.NFC()
    reference.add_special_tokens(SPECIAL)
    reference.add_tokens([tokenizers.AddedToken("<think>", normalized=False)])
    tokenizer = build(byte_level_metadata(model, pre))
    assert tokenizer.fingerprint() == Tokenizer(reference).fingerprint()
    for text in [*CORPUS, "x<|im_start|>user<think>\n y", "e\u0301 १२३४ \t\r\n  ", "I'M  fine1234567"]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == reference.encode(text).ids
        assert tokenizer.decode(ids) == reference.decode(ids)
    assert tokenizer.encode("") == ([1] if pre == "llama-bpe" else [])
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 0)


def test_qwen2_encodes_as_transformers_does() -> None:
    transformers = pytest.importorskip("transformers")
    model = trained(splitter_for("qwen2"))
    reference = transformers.Qwen2Tokenizer(vocab=model["vocab"], merges=[tuple(merge) for merge in model["merges"]])
    tokenizer = build(byte_level_metadata(model, "qwen2"))
    for text in CORPUS:
        assert tokenizer.encode(text) == reference.encode(text)


def test_the_default_splitting() -> None:
    merges = [("1", "2"), ("12", "3"), ("123", "4"), ("Ġ", "("), ("a", "b"), ("Ġ", "ab")]
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(merge) for merge in merges)]
    model = {"vocab": {token: id for id, token in enumerate(tokens)}, "merges": merges}
    values = byte_level_metadata(model, "default")
    tokenizer = build(values)
    # Digits are cut by threes, and punctuation does not join the space before it.
    pieces = [tokenizer.token(id) for id in tokenizer.encode("ab ab (1234)")]
    assert pieces == ["ab", " ab", " ", "(", "123", "4", ")"]
    del values["tokenizer.ggml.pre"]
    assert [build(values).encode(text) for text in CORPUS] == [tokenizer.encode(text) for text in CORPUS]


def test_chat_templates() -> None:
    tokenizer = build(byte_level_metadata(trained(splitter_for("gpt-2")), "gpt-2"))
    assert tokenizer.chat([{"content": "hi"}]) == "<|im_start|>hi"
    assert tokenizer.chat([], ChatOptions(tools=[{}])) == "with tools"


def test_fillers_are_not_tokens() -> None:
    values = byte_level_metadata(trained(splitter_for("gpt-2")), "gpt-2")
    plain = build(values)
    first = len(values["tokenizer.ggml.tokens"])
    values["tokenizer.ggml.tokens"] += [f"[PAD{id}]" for id in range(first, first + 4)]
    values["tokenizer.ggml.token_type"] += [UNUSED, UNUSED, USER_DEFINED, USER_DEFINED]
    filled = build(values)
    assert filled.fingerprint() == plain.fingerprint()
    assert filled.vocab_size == plain.vocab_size == first
    assert filled.token(first + 2) == ""


def test_the_file_says_what_goes_around_a_text() -> None:
    model = trained(splitter_for("gpt-2"))
    both = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    assert build(byte_level_metadata(model, "gpt-2") | both).encode("") == [1, 0]
    neither = {"tokenizer.ggml.add_bos_token": False}
    assert build(byte_level_metadata(model, "llama-bpe") | neither).encode("") == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokenizer.ggml.pre": "klingon"}, "pre-tokenizer 'klingon' is unknown, only default"),
        ({"tokenizer.ggml.merges": ["no such"]}, "its tokenizer is damaged"),
        ({"tokenizer.ggml.merges": ["nospace"]}, "its tokenizer is damaged"),
        ({"tokenizer.ggml.merges": [1]}, "other values than texts"),
        ({"tokenizer.ggml.merges": "a b"}, "'tokenizer.ggml.merges' is a str, not a list"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "do not match"),
        ({"tokenizer.ggml.tokens": [1, 2], "tokenizer.ggml.token_type": [1, 1]}, "other values than texts"),
        ({"tokenizer.ggml.model": "rwkv"}, "the tokenizer 'rwkv' cannot be read, only gpt2, llama"),
        ({"tokenizer.ggml.model": "llama"}, "lacks the key 'tokenizer.ggml.scores'"),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.0]}, "do not match"),
        ({"tokenizer.ggml.bos_token_id": 10**6}, "bos_token_id"),
    ],
)
def test_a_tokenizer_that_cannot_be_read(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError) as caught:
        build(byte_level_metadata(trained(splitter_for("gpt-2")), "gpt-2") | changes)
    assert "model.gguf" in str(caught.value)
    assert reason in str(caught.value)


@pytest.mark.parametrize("values", [{}, {"tokenizer.ggml.model": "none"}, {"tokenizer.ggml.model": "no_vocab"}])
def test_a_file_without_tokenizer_has_none(values: dict[str, Any]) -> None:
    assert build_tokenizer(Metadata(values, Path("model.gguf"))) is None


# Sentencepiece


def sentencepiece_scores() -> dict[str, float]:
    """Pieces in the order in which training made them, as sentencepiece scores them; single characters come last."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=260, limit_alphabet=70, show_progress=False))
    model = json.loads(backend.to_str())["model"]
    merged = dict.fromkeys("".join(merge) for merge in model["merges"])
    pieces = dict.fromkeys([*merged, "▁", *model["vocab"]])
    pieces = [piece for piece in pieces if "\n" not in piece and "▁▁" not in piece]  # runs are tokens of their own
    return {piece: -float(rank) for rank, piece in enumerate(pieces)}


def sentencepiece_encode(text: str, scores: dict[str, float]) -> list[str]:
    """The slow, obvious way: join the two neighbours that make the best piece, until no two make one."""
    symbols = list(text)
    while True:
        joined = [left + right for left, right in pairwise(symbols)]
        known = [(-scores[piece], at) for at, piece in enumerate(joined) if piece in scores]
        if not known:
            break
        _, at = min(known)
        symbols[at : at + 2] = [joined[at]]
    spelt = [[symbol] if symbol in scores else [f"<0x{byte:02X}>" for byte in symbol.encode()] for symbol in symbols]
    return [token for tokens in spelt for token in tokens]


def reference_encode(text: str, *, prefix: bool) -> list[str]:
    """Tokens that stand for themselves first, the longest at each place; then each stretch between them is merged."""
    spaces = {"  ": "[ ▁]{2}", "   ": "[ ▁]{3}"}  # without a prefix, runs are looked for among normalised spaces
    written = [re.escape(token) if prefix else spaces.get(token, re.escape(token)) for token in sorted(ADDED, key=len)]
    tokens: list[str] = []
    for part in re.split(f"({'|'.join(reversed(written))})", text):
        plain = part if prefix else part.replace("▁", " ")
        if part in ADDED or plain in ADDED:
            tokens.append(part if part in ADDED else plain)
        elif part:
            tokens += sentencepiece_encode("▁" * prefix + part.replace(" ", "▁"), SCORES)
    return tokens


SCORES = sentencepiece_scores()
ADDED = ["<unk>", "<s>", "</s>", "[INST]", "<b>", "\n", "\n\n", "\n\n\n", "  ", "   "]
TOKENS = [*ADDED[:3], *[f"<0x{byte:02X}>" for byte in range(256)], *SCORES, *ADDED[3:]]
KINDS = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(SCORES), *[USER_DEFINED] * len(ADDED[3:])]
SENTENCEPIECE = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": KINDS,
    "tokenizer.ggml.scores": [SCORES.get(token, -1000.0) for token in TOKENS],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}
# Llama 2 puts a space before a text, Gemma does not.
TOKENIZERS = {True: build(SENTENCEPIECE), False: build(SENTENCEPIECE | {"tokenizer.ggml.add_space_prefix": False})}
FRAGMENTS = st.sampled_from(["the", " quick", "again", " ", "  ", "\n", "\r\n", "\t", "1", "你好", "🦊", "▁", *ADDED])


@settings(max_examples=300, deadline=None)
@given(text=st.lists(FRAGMENTS | st.characters(codec="utf-8"), min_size=1).map("".join), prefix=st.booleans())
def test_sentencepiece_tokenizers(text: str, prefix: bool) -> None:
    tokenizer = TOKENIZERS[prefix]
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert [TOKENS[id] for id in ids] == reference_encode(text, prefix=prefix)
    decoded = tokenizer.decode(ids, skip_special_tokens=False)
    has_prefixes = prefix and any(token in text for token in ADDED)  # after each of them comes one more space
    if "▁" not in text and not has_prefixes:
        assert decoded == text
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    assert "".join(map(detokenizer.add, ids)) + detokenizer.finish() == decoded


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, len(TOKENS) - 1)), prefix=st.booleans(), skip=st.booleans())
def test_any_tokens_stream_as_they_decode(ids: list[int], prefix: bool, skip: bool) -> None:
    detokenizer = Detokenizer(TOKENIZERS[prefix], skip_special_tokens=skip)
    text = "".join(map(detokenizer.add, ids)) + detokenizer.finish()
    assert text == TOKENIZERS[prefix].decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(words=st.lists(st.text("ab", min_size=2, max_size=6), unique=True), text=st.text("ab", max_size=40))
def test_merging_by_score_whatever_the_vocabulary(words: list[str], text: str) -> None:
    """Vocabularies that no training would make, with pieces that can be made in several ways."""
    scores = {piece: -float(rank) for rank, piece in enumerate([*words, "a", "b"])}
    tokens = ["<unk>", *scores]
    vocabulary = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [UNKNOWN] + [NORMAL] * len(scores),
        "tokenizer.ggml.scores": [0.0, *scores.values()],
        "tokenizer.ggml.add_space_prefix": False,
    }
    assert [tokens[id] for id in build(vocabulary).encode(text)] == sentencepiece_encode(text, scores)


@pytest.mark.parametrize("text", CORPUS)
def test_sentencepiece_tokenizers_on_known_text(text: str) -> None:
    ids = TOKENIZERS[True].encode(text, add_special_tokens=False)
    assert [TOKENS[id] for id in ids] == reference_encode(text, prefix=True)
    assert len(ids) < len(text.encode())


def test_special_tokens_of_sentencepiece_tokenizers() -> None:
    tokenizer = TOKENIZERS[True]
    assert tokenizer.encode("") == [tokenizer.bos_token_id] == [1]
    assert tokenizer.eos_token_id == 2
    ids = tokenizer.encode("[INST] the fox</s>")
    assert ids[:2] == [1, TOKENS.index("[INST]")]
    assert ids[-1] == 2
    assert tokenizer.token(3 + 0x41) == "A"


def test_scores_that_are_no_numbers() -> None:
    with pytest.raises(ValueError, match="do not match"):
        build(SENTENCEPIECE | {"tokenizer.ggml.scores": ["high"] * len(TOKENS)})


def test_the_tokenizer_alone(tmp_path: Path) -> None:
    """Read without the rest of a checkpoint, it is the same."""
    writer = minimal_writer(tmp_path / "model.gguf")
    add_embedding(writer)
    model = trained(splitter_for("gpt-2"))
    words = sorted(model["vocab"], key=model["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    for path in (finish(writer), DEFAULT_DIRECTORY / "target"):
        checkpoint = open_checkpoint(path)
        whole, alone = load_tokenizer(checkpoint), tokenizer_at(path)
        checkpoint.close()
        assert whole is not None
        assert alone is not None
        assert alone.fingerprint() == whole.fingerprint()
        assert alone.encode("Hello there") == whole.encode("Hello there")
    (tmp_path / "empty").mkdir()
    assert tokenizer_at(tmp_path / "empty") is None


def test_texts_of_a_vocabulary_are_read_when_they_are_asked_for(tmp_path: Path) -> None:
    """Kept while the weights are read, they would leave memory behind that nobody can use."""
    tokens, path = ["<unk>", "one", "größer", "😀"], tmp_path / "model.gguf"
    writer = minimal_writer(path)
    writer.add_token_list(tokens)
    finish(writer)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        metadata, _ = HeaderReader(memory, path).read()
        assert not any(isinstance(value, list) for value in metadata.values.values())
        assert metadata.has_list("tokenizer.ggml.tokens")
        first, second = (metadata.get("tokenizer.ggml.tokens", list) for _ in range(2))
        assert first == second == tokens
        assert first is not second
    path.write_bytes(path.read_bytes().replace("größer".encode(), b"gr\xff\xffer\xff\xff"))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        metadata, _ = HeaderReader(memory, path).read()
        with pytest.raises(ValueError, match="not UTF-8"):
            metadata.get("tokenizer.ggml.tokens", list)
