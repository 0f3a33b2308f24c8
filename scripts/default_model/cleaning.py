"""Cleaning of generated text: plain ASCII, common words, whole sentences, cut where it starts to go in circles."""

import itertools
import re
from collections import Counter
from dataclasses import dataclass

PLAIN = str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"', "–": "-", "—": "-", "…": "...", "\u00a0": " "})
MARKUP = re.compile(r"\*\*|__|^#+ *|^[*•] ", re.MULTILINE)
UNWANTED_SIGNS = re.compile(r"[^\n -~]|[\[\]{}<>|\\^~`_@#$*()/=+]|\d{3}")
UNWANTED_WORDS = re.compile(
    r"\b(AI|[Aa]ssistant|SmolLM|Hugging|language model|chatbot|[Aa]s an|I'm sorry|I apologize|I cannot|I can't provide|"
    r"simple words|simple sentences?|short sentences?|the user|the prompt|the text|writing|website|COVID|https?|www|"
    r"kill\w*|suicide|sex\w*|drugs?|guns?|murder\w*|blood\w*|rape|alcohol|wine|beer|racis\w+|death|dead|died)\b"
)
SENTENCE = re.compile(r".+?(?:[.!?]+[\"']*(?=\s|$)|$)\s*", re.DOTALL)
WORD = re.compile(r"[a-z']+")
MIN_WORDS = {"story": 45, "dialogue": 35, "letter": 30, "diary": 30, "description": 20}
LEAST_WORDS, MAX_WORDS = 12, 150
MIN_WORD_COUNT = 40
MAX_FAMILIAR_SHARE = 0.4


def plain(text: str) -> str:
    """The text without typographic signs and markup, its white space regular."""
    text = MARKUP.sub("", text.translate(PLAIN)).strip()
    return re.sub(r"[ \t]+", " ", re.sub(r" *\n\s*\n\s*", "\n\n", text))


def common_words(texts: list[str]) -> frozenset[str]:
    """Words that many texts use; a text counts a word once."""
    counts = Counter(word for text in texts for word in set(WORD.findall(text.lower())))
    return frozenset(word for word, count in counts.items() if count >= MIN_WORD_COUNT)


@dataclass(frozen=True)
class Cut:
    """The good beginning of a text, and whether that is all of it."""

    text: str
    is_whole: bool


def _is_stale(words: list[str], seen: set[tuple[str, ...]]) -> bool:
    """Whether a sentence repeats itself or what came before."""
    if any(first == second for first, second in itertools.pairwise(words)):
        return True
    if any(count > 2 and len(word) > 3 for word, count in Counter(words).items()):
        return True
    runs = list(zip(words, words[1:], words[2:], strict=False))
    num_familiar = sum(run in seen for run in runs) + len(runs) - len(set(runs))
    return num_familiar > MAX_FAMILIAR_SHARE * max(len(runs), 3)


def _good_sentences(text: str, common: frozenset[str]) -> list[str]:
    """The sentences of the text up to the first that should not be learnt from."""
    kept: list[str] = []
    seen: set[tuple[str, ...]] = set()
    num_words = 0
    for sentence in SENTENCE.findall(text):
        words = WORD.findall(sentence.lower())
        num_words += len(words)
        unwanted = UNWANTED_SIGNS.search(sentence) or UNWANTED_WORDS.search(sentence)
        if unwanted or num_words > MAX_WORDS or not common.issuperset(words) or _is_stale(words, seen):
            break
        seen.update(zip(words, words[1:], words[2:], strict=False))
        kept.append(sentence)
    return kept


def _is_open(text: str) -> bool:
    """Whether the text stops inside a quotation, a list or a sentence."""
    return text.count('"') % 2 == 1 or not text.endswith((".", "!", "?", '."', '!"', '?"')) or text[-2:-1].isdigit()


def clean(kind: str, text: str, complete: bool, common: frozenset[str]) -> Cut | None:
    """The good beginning of a plain text, or None where there is too little; `complete`: the text ended by itself."""
    sentences = _good_sentences(text, common)
    is_whole = complete and sum(map(len, sentences)) == len(text)
    while sentences and not is_whole and _is_open("".join(sentences).strip()):
        sentences.pop()
    kept = "".join(sentences).strip()
    is_enough = len(kept.split()) >= MIN_WORDS.get(kind, LEAST_WORDS)
    return Cut(kept, is_whole) if is_enough else None
