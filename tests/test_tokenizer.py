"""Tokenizers on small vocabularies trained here: chat templates, streaming text against decode(), stop strings.
transformers is the reference for what a tokenizer directory means."""

import json
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from outrider import chat_template
from outrider.chat_template import ChatOptions
from outrider.detokenizer import Detokenizer, StopChecker
from outrider.tokenizer import Tokenizer, surround

CORPUS = [
    "the quick brown fox jumps over the lazy dog, again and again",
    "naïve café déjà vu: größer als 12345 Straßen",
    "你好，世界。今天天气很好",
    "smile 😀 thumbs 👍🏽 family 👨‍👩‍👧‍👦 flag 🇪🇺",
    "def add(a, b):\n    return a + b\n",
]
SPECIAL = ["<unk>", "<s>", "</s>"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "    {% if message.role == 'secret' %}{{ raise_exception('no secrets') }}{% endif %}\n"
    "{{ message.role }}: {{ message.content }}{{ eos_token }}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def byte_level_backend() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("é", normalized=False), AddedToken("<tool▁call>", normalized=False)])
    return backend


def metaspace_backend(strip: bool = True) -> tokenizers.Tokenizer:
    """Sentencepiece style: spaces as ▁, and bytes for the characters that the vocabulary lacks."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=200, show_progress=False, limit_alphabet=60)
    trained.train_from_iterator(CORPUS, trainer)
    learnt = json.loads(trained.to_str())["model"]
    tokens = SPECIAL + [f"<0x{byte:02X}>" for byte in range(256)] + list(learnt["vocab"])
    vocabulary = {token: id for id, token in enumerate(tokens)}
    merges = [tuple(merge) for merge in learnt["merges"]]
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return backend


def plain_metaspace_backend() -> tokenizers.Tokenizer:
    backend = metaspace_backend()
    backend.decoder = decoders.Metaspace()
    return backend


TOKENIZERS = {
    "byte_level": Tokenizer(byte_level_backend()),
    "metaspace": Tokenizer(metaspace_backend()),
    "metaspace_unstripped": Tokenizer(metaspace_backend(strip=False)),
    "plain_metaspace": Tokenizer(plain_metaspace_backend()),
}
every_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())


def stream(tokenizer: Tokenizer, ids: list[int], **options: object) -> str:
    detokenizer = Detokenizer(tokenizer, **options)
    pieces = [detokenizer.add(id) for id in ids] + [detokenizer.finish()]
    assert detokenizer.text == "".join(pieces)
    return detokenizer.text


# Detokenizer


@every_tokenizer
@settings(max_examples=150, deadline=None)
@given(text=st.text())
def test_streamed_text_is_the_decoded_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert stream(tokenizer, ids) == tokenizer.decode(ids)


@every_tokenizer
@settings(max_examples=300, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_streamed_text_is_the_decoded_text_of_any_ids(tokenizer: Tokenizer, data: st.DataObject, skip: bool) -> None:
    # Bytes, special tokens and an id beyond the vocabulary are drawn more often than their share.
    id = st.integers(0, tokenizer.vocab_size) | st.integers(0, 260)
    ids = data.draw(st.lists(id, max_size=40))
    assert stream(tokenizer, ids, skip_special_tokens=skip) == tokenizer.decode(ids, skip_special_tokens=skip)


@every_tokenizer
@settings(max_examples=100, deadline=None)
@given(prompt=st.text(min_size=1), text=st.text())
def test_text_after_a_prompt_continues_it(tokenizer: Tokenizer, prompt: str, text: str) -> None:
    prompt_ids, ids = tokenizer.encode(prompt), tokenizer.encode(text)
    shown, whole = tokenizer.decode(prompt_ids), tokenizer.decode(prompt_ids + ids)
    assume(not shown.endswith("\N{REPLACEMENT CHARACTER}"))  # it ends inside a character, as in the next test
    assert stream(tokenizer, ids, prompt_ids=prompt_ids) == whole[len(shown) :]


@every_tokenizer
@pytest.mark.parametrize("cut", [1, 2, 3, 5])
def test_a_prompt_may_end_inside_a_character(tokenizer: Tokenizer, cut: int) -> None:
    ids = tokenizer.encode("ok 🦊", add_special_tokens=False)
    prompt, rest = ids[:-cut], ids[-cut:]
    whole = tokenizer.decode(ids)
    shown = tokenizer.decode(prompt).rstrip("\N{REPLACEMENT CHARACTER}")
    if tokenizer is not TOKENIZERS["plain_metaspace"]:  # its decoder writes byte tokens out as they are
        assert stream(tokenizer, rest, prompt_ids=prompt) == whole[len(shown) :]
    assert stream(tokenizer, [], prompt_ids=prompt) == ""


@every_tokenizer
def test_settled_text_never_changes_and_is_never_broken(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a 🦊 and 龍 in the naïve 👨‍👩‍👧‍👦")
    whole = tokenizer.decode(ids)
    assert "\N{REPLACEMENT CHARACTER}" not in whole
    detokenizer = Detokenizer(tokenizer)
    for id in ids:
        detokenizer.add(id)
        assert whole.startswith(detokenizer.text)
    assert len(detokenizer.text) > len(whole) // 2
    detokenizer.finish()
    assert detokenizer.text == whole


def test_invalid_bytes_do_not_hold_back_the_text_after_them() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    backend = byte_level_backend()
    continuation = backend.token_to_id("Ģ")  # byte 0x80, which begins no character
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.add(continuation) for _ in range(3)] == ["\N{REPLACEMENT CHARACTER}"] * 3


def test_streaming_decodes_a_window_and_not_the_history(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = TOKENIZERS["metaspace"]
    decoded: list[int] = []
    decode = tokenizer.decode
    monkeypatch.setattr(
        tokenizer, "decode", lambda ids, **options: (decoded.append(len(ids)), decode(ids, **options))[1]
    )
    stream(tokenizer, tokenizer.encode("the lazy dog jumps over " * 20))
    assert max(decoded) <= 3


# Tokenizer


def write_directory(path: Path, config: dict, backend: tokenizers.Tokenizer | None = None) -> Path:
    (backend or byte_level_backend()).save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "TokenizersBackend", **config}))
    return path


@pytest.mark.parametrize("backend", [byte_level_backend(), metaspace_backend()], ids=["byte_level", "metaspace"])
@pytest.mark.parametrize("around", [(None, None), ("<s>", None), ("<s>", "</s>")])
def test_a_directory_means_what_transformers_reads(
    tmp_path: Path, backend: tokenizers.Tokenizer, around: tuple[str | None, str | None]
) -> None:
    transformers = pytest.importorskip("transformers")
    surround(backend, *around)
    config = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_bos_token": False,  # tokenizer.json goes before it
        "added_tokens_decoder": {str(backend.get_vocab_size()): {"content": "<|later|>", "special": True}},
        "chat_template": TEMPLATE,
    }
    path = write_directory(tmp_path, config, backend)
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(path)
    ours = Tokenizer.from_directory(path)
    assert ours is not None
    assert (ours.bos_token_id, ours.eos_token_id) == (reference.bos_token_id, reference.eos_token_id) == (1, 2)
    assert ours.vocab_size == len(reference)
    for text in [*CORPUS, "", " two  spaces", "<s>kept</s> <|later|>x", "🦊\n\n\t1 234"]:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == reference.encode(text, add_special_tokens=special)
            assert ours.decode(ids, skip_special_tokens=special) == reference.decode(ids, skip_special_tokens=special)
    messages = [{"role": "user", "content": "a < b & c"}, {"role": "assistant", "content": "é"}]
    tools = [{"type": "function", "function": {"name": "f", "description": "<é>"}}]
    for options in ({}, {"tools": tools}):
        expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
        assert ours.chat(messages, ChatOptions(**options)) == expected


def test_flags_decide_where_tokenizer_json_does_not(tmp_path: Path) -> None:
    special = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    for flags, expected in (({}, []), ({"add_bos_token": True}, [1]), ({"add_bos_token": False}, [])):
        tokenizer = Tokenizer.from_directory(write_directory(tmp_path, special | flags))
        assert tokenizer is not None
        assert tokenizer.encode("") == expected
        assert tokenizer.encode("", add_special_tokens=False) == []


def test_a_directory_without_tokenizer_has_none(tmp_path: Path) -> None:
    assert Tokenizer.from_directory(tmp_path) is None


@pytest.mark.parametrize(
    ("name", "content"),
    [("tokenizer.json", "{}"), ("tokenizer.json", "version https"), ("tokenizer_config.json", "[1]")],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: str) -> None:
    write_directory(tmp_path, {})
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        Tokenizer.from_directory(tmp_path)


def test_special_tokens_map_fills_in(tmp_path: Path) -> None:
    write_directory(tmp_path, {"eos_token": "</s>"})
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "<s>"}))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer is not None
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


def test_templates_by_name_and_from_files(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    write_directory(tmp_path, {"chat_template": templates})
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer is not None
    assert tokenizer.has_chat_template
    assert tokenizer.chat([]) == "plain"
    assert tokenizer.chat([], ChatOptions(tools=[{}])) == "with tools"
    (tmp_path / "chat_template.jinja").write_text("from a file")
    reread = Tokenizer.from_directory(tmp_path)
    assert reread is not None
    assert reread.chat([]) == "from a file"


def chat_tokenizer(template: str) -> Tokenizer:
    return Tokenizer(
        byte_level_backend(), special_tokens={"bos_token": "<s>", "eos_token": "</s>"}, templates={"default": template}
    )


def test_template_features() -> None:
    template = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{{ mood }} {{ strftime_now('%Y')[:2] }}"
    )
    options = ChatOptions(template_kwargs={"mood": "calm"})
    assert chat_tokenizer(template).chat([{"content": "a"}, {"content": "b"}], options) == "acalm 20"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "failed on these messages"),
        ("{% for", "does not parse"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}", "more than 1000 characters"),
    ],
)
def test_a_bad_template_is_a_value_error(template: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_CHAT_LEN", 1000)
    with pytest.raises(ValueError, match=reason):
        chat_tokenizer(template).chat([{"role": "user", "content": "hello"}])


def test_no_template_is_a_value_error() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    assert not tokenizer.has_chat_template
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.chat([{"role": "user", "content": "hello"}])


def test_half_a_surrogate_pair_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="surrogate"):
        TOKENIZERS["byte_level"].encode("\ud83d")


@every_tokenizer
def test_the_text_of_one_token(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the lazy dog", add_special_tokens=False)
    assert "".join(tokenizer.token(id) for id in ids).strip() == "the lazy dog"
    assert any(tokenizer.token(id).startswith(" ") for id in ids)
    assert tokenizer.token(1) == "<s>"
    assert tokenizer.token(tokenizer.vocab_size + 5) == ""
    fox = tokenizer.encode("🦊", add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes(id) for id in fox).strip() == "🦊".encode()


def test_fingerprints_compare_vocabularies() -> None:
    one, same = Tokenizer(byte_level_backend()), Tokenizer(byte_level_backend(), templates={"default": "x"})
    backend = byte_level_backend()
    backend.add_tokens(["another"])
    assert one.fingerprint() == same.fingerprint()
    assert one.fingerprint() != Tokenizer(backend).fingerprint()
    assert len(one.fingerprint()) == 64


# StopChecker


def check(chunks: list[str], stop: list[str], include_stop: bool = False) -> tuple[str, str | None]:
    checker = StopChecker(stop, include_stop=include_stop)
    shown = ""
    for chunk in chunks:
        text, matched = checker.add(chunk)
        shown += text
        if matched is not None:
            assert checker.add("more") == ("", matched)
            assert checker.finish() == ""
            return shown, matched
    return shown + checker.finish(), None


def test_stop_strings() -> None:
    assert check(["hello wor", "ld again"], ["world"]) == ("hello ", "world")
    assert check(["hello wor", "ld again"], ["world"], include_stop=True) == ("hello world", "world")
    assert check(["hello wor", "m"], ["world"]) == ("hello worm", None)
    assert check(["hello wor"], ["world"]) == ("hello wor", None)
    assert check(["abc"], ["abc", "b"]) == ("a", "b")  # complete before the longer one
    assert check(["xab"], ["b", "ab"]) == ("x", "ab")  # both end here: the longer one
    assert check(["any"], []) == ("any", None)
    with pytest.raises(ValueError, match="empty"):
        StopChecker([""])


def test_only_the_beginning_of_a_stop_string_is_held_back() -> None:
    checker = StopChecker(["\n\nUser:"])
    assert checker.add("fine\n") == ("fine", None)
    assert checker.add("\nUs") == ("", None)
    assert checker.add("ually") == ("\n\nUsually", None)
    assert checker.finish() == ""


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("abc", max_size=20),
    stop=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 20), max_size=6),
    include_stop=st.booleans(),
)
def test_chunking_does_not_matter(text: str, stop: list[str], cuts: list[int], include_stop: bool) -> None:
    edges = [0, *sorted(cuts), len(text)]
    chunks = [text[start:end] for start, end in pairwise(edges)]
    expected = check(list(text), stop, include_stop)
    assert check(chunks, stop, include_stop) == expected
    ends = [(end, -len(s), s) for s in stop for end in range(len(s), len(text) + 1) if text[:end].endswith(s)]
    if not ends:
        assert expected == (text, None)
    else:
        end, negative_len, matched = min(ends)
        assert expected == (text[: end if include_stop else end + negative_len], matched)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_long_texts_are_encoded_like_short_ones(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = " ".join([*CORPUS, "<s>kept</s> 🦊\n\n\t1 234"])
    for special in (True, False):
        short = TOKENIZERS[kind].encode(text, add_special_tokens=special)
        with monkeypatch.context() as patch:
            patch.setattr("outrider.tokenizer.LONG_TEXT", 1)
            assert TOKENIZERS[kind].encode(text, add_special_tokens=special) == short
            long = TOKENIZERS[kind].decode(short, skip_special_tokens=special)
        assert long == TOKENIZERS[kind].decode(short, skip_special_tokens=special)


def test_other_threads_go_on_while_a_long_text_is_encoded() -> None:
    """If the interpreter's lock were held for all of it, another thread would run once or twice, however long it is."""
    tokenizer = TOKENIZERS["byte_level"]
    text = " ".join(CORPUS) * (400_000 // len(" ".join(CORPUS)))
    turns, encoding, begun = 0, True, threading.Event()

    def count() -> None:
        nonlocal turns
        begun.set()
        while encoding:
            turns += 1
            time.sleep(0.0005)

    thread = threading.Thread(target=count)
    thread.start()
    begun.wait(10)
    before = turns
    tokenizer.encode(text)
    during, encoding = turns - before, False
    thread.join()
    assert during >= 10
