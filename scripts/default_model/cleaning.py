"""Cleaning of generated text: plain ASCII, whole sentences, no talk about being a model, no loops."""

import re
from collections import Counter

PLAIN = str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"', "–": "-", "—": "-", "…": "...", "\u00a0": " "})
MARKUP = re.compile(r"\*\*|__|^#+ *|^[*•] ", re.MULTILINE)
UNWANTED_SIGNS = re.compile(r"[^\n -~]|[\[\]{}<>|\\^~`_@#$*]")
UNWANTED_WORDS = re.compile(
    r"\b(AI|assistant|SmolLM|Hugging|language model|chatbot|as an|I'm sorry|I apologize|I cannot|I can't provide|"
    r"simple words|simple sentences|short sentence|short sentences|the user|the prompt|the text|creative writing|"
    r"COVID|https?|www|kill|killed|suicide|sex|sexual|drug|drugs|gun|murder|blood|rape|alcohol|wine|beer|racist)\b"
)
SENTENCE_END = re.compile(r"[.!?][\"')]?(?=\s|$)")
MIN_WORDS, MAX_WORDS = 8, 260
MAX_REPEATED_SHARE = 0.10
MAX_REPEATED_SENTENCES = 0


def _repeats(text: str) -> bool:
    """Whether the text runs in circles: repeated sentences, or too many repeated runs of four words."""
    sentences = [part.strip().lower() for part in re.split(r"(?<=[.!?])\s+", text) if len(part.split()) > 3]
    if len(sentences) - len(set(sentences)) > MAX_REPEATED_SENTENCES:
        return True
    tokens = re.findall(r"[a-z']+", text.lower())
    runs = Counter(zip(tokens, tokens[1:], tokens[2:], tokens[3:], strict=False))
    num_runs = sum(runs.values())
    return num_runs > 0 and (num_runs - len(runs)) / num_runs > MAX_REPEATED_SHARE


def _whole_sentences(text: str) -> str:
    """The text up to its last sentence end."""
    ends = [match.end() for match in SENTENCE_END.finditer(text)]
    return text[: ends[-1]] if ends else ""


def clean(text: str, complete: bool) -> str | None:
    """The text made plain, or None where it should not be learnt from; `complete`: it ended by itself."""
    text = MARKUP.sub("", text.translate(PLAIN)).strip()
    text = re.sub(r"[ \t]+", " ", re.sub(r" *\n\s*\n\s*", "\n\n", text))
    if not complete:
        text = _whole_sentences(text)
    num_words = len(text.split())
    if not MIN_WORDS <= num_words <= MAX_WORDS:
        return None
    if UNWANTED_SIGNS.search(text) or UNWANTED_WORDS.search(text) or _repeats(text):
        return None
    return text
