"""The tokenizer stage: a byte-level BPE of 4096 tokens with a small chat template."""

import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from default_model.corpus import Example, read_examples

END, USER, ASSISTANT, SYSTEM, PAD = "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|pad|>"
SPECIAL_TOKENS = [END, USER, ASSISTANT, SYSTEM, PAD]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
VOCABULARY_SIZE = 4096
MAX_LENGTH = 2048


def _lines(examples: list[Example]) -> Iterator[str]:
    for example in examples:
        yield example.prompt
        yield example.answer


def train_tokenizer(lines: Iterator[str]) -> Tokenizer:
    """A byte-level BPE with single digits; every byte has a token, so that any text can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_LENGTH,
        "bos_token": None,
        "eos_token": END,
        "pad_token": PAD,
        "unk_token": None,
        "additional_special_tokens": [USER, ASSISTANT, SYSTEM],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def make_tokenizer(data: Path, out: Path, num_examples: int = 60000) -> None:
    """Train on a part of the text and save."""
    examples = read_examples(data)[:num_examples]
    tokenizer = train_tokenizer(_lines(examples))
    save_tokenizer(tokenizer, out)
    sample = [example.answer for example in examples[:2000]]
    num_tokens = sum(len(encoding.ids) for encoding in tokenizer.encode_batch(sample))
    print(f"{tokenizer.get_vocab_size()} tokens, {sum(map(len, sample)) / num_tokens:.2f} characters per token")
