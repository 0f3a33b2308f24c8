"""A conversation in the terminal: messages in, coloured answers out, and a few commands that begin with a slash.
The whole conversation is the prompt of every turn; the prefix cache spares computing it again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

from outrider.console import Consoles, StreamedText, show_error, show_note, show_speculation
from outrider.llm import LLM
from outrider.measure import Question, Run, method_of, run
from outrider.sampling_params import SamplingParams, Speculation

HELP = "/reset forgets the conversation, /stats tells how it went, /plain turns speculation off and on, /quit ends"


@dataclass
class Totals:
    """Sums over the answers so far."""

    num_answers: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    speculation: Speculation = field(default_factory=Speculation)

    def add(self, answer: Run) -> None:
        self.num_answers += 1
        self.num_tokens += answer.num_tokens
        self.seconds += answer.seconds
        self.num_prompt_tokens += answer.num_prompt_tokens
        self.num_cached_tokens += answer.num_cached_tokens
        self.speculation += answer.completion.speculation

    def __str__(self) -> str:
        if not self.num_answers:
            return "no answers yet"
        return (
            f"{self.num_answers} answers, {self.num_tokens} tokens, {self.num_tokens / self.seconds:.1f} tokens/s, "
            f"{self.num_cached_tokens} of {self.num_prompt_tokens} prompt tokens from the cache"
        )


class ChatSession:
    def __init__(self, llm: LLM, params: SamplingParams, consoles: Consoles, system: str | None = None) -> None:
        if llm.tokenizer is None or not llm.tokenizer.has_chat_template:
            raise ValueError(f"{llm.config.model} has no chat template: use outrider generate, or choose a chat model")
        self.llm, self.params, self.consoles = llm, params, consoles
        self.speculates = True
        self.totals = Totals()
        self._opening = [{"role": "system", "content": system}] if system is not None else []
        self.messages = list(self._opening)
        self.commands: dict[str, Callable[[], None]] = {
            "/reset": self.reset,
            "/stats": self.show_stats,
            "/plain": self.toggle_speculation,
            "/help": lambda: self._note(HELP),
        }

    def answer(self, message: str) -> Run:
        """Streams the answer. Where that fails, the conversation is as it was before the message."""
        asked = [*self.messages, {"role": "user", "content": message}]
        params = replace(self.params, num_speculative_tokens=None if self.speculates else 0)
        shown = StreamedText(self.consoles.out)
        answer = run(self.llm, Question(self.llm.chat_prompt(asked), params), shown.show)
        shown.finish()
        self.messages = [*asked, {"role": "assistant", "content": answer.completion.text}]
        self.totals.add(answer)
        return answer

    def reset(self) -> None:
        self.messages = list(self._opening)
        self._note("a new conversation")

    def show_stats(self) -> None:
        self._note(str(self.totals))
        method = method_of(self.llm)
        if method is not None and self.totals.num_answers:
            show_speculation(self.consoles.about, self.totals.speculation, method)

    def toggle_speculation(self) -> None:
        if self.llm.drafter is None:
            self._note("there is no drafter: every answer is decoded plainly")
            return
        self.speculates = not self.speculates
        self._note(f"speculation is {'on' if self.speculates else 'off: answers are decoded plainly'}")

    def command(self, line: str) -> None:
        name = line.split()[0]
        if name in self.commands:
            self.commands[name]()
        else:
            self._note(f"unknown command {name} ({HELP}); to send it as a message, begin with a space")

    def _note(self, note: str) -> None:
        show_note(self.consoles.about, note)


def converse(conversation: ChatSession) -> None:
    """Until /quit or the end of input. Someone at a terminal may try again after an error; a pipe ends with it."""
    interactive = sys.stdin.isatty()
    about = conversation.consoles.about
    if interactive:
        show_note(about, f"{HELP}; Ctrl-C stops an answer, Ctrl-D ends")
    for line in _read_lines(interactive):
        if line.split()[:1] == ["/quit"] and line[0] == "/":
            break
        if line.startswith("/"):
            conversation.command(line)
        elif line.strip():
            try:
                answer = conversation.answer(line.strip())
            except ValueError as error:
                if not interactive:
                    raise
                show_error(about, error)
                continue
            if interactive:
                show_note(about, _summary(answer))


def _read_lines(interactive: bool) -> Iterator[str]:
    if not interactive:
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    with suppress(ImportError):  # not on every system; without it there is no history
        import readline  # noqa: F401
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:  # gives up the line, not the conversation
            print()


def _summary(answer: Run) -> str:
    speculation = answer.completion.speculation
    parts = [f"{answer.num_tokens} tokens", f"{answer.tokens_per_second:.1f} tokens/s"]
    if speculation.drafted:
        parts.append(f"accept length {speculation.accept_length:.2f}")
    if answer.interrupted:
        parts.append("interrupted")
    elif answer.completion.finish_reason == "length":
        parts.append("cut short: raise --max-tokens, or /reset if the context is full")
    return ", ".join(parts)
