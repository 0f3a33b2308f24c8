"""Reasoning before the answer: `<think>...</think>`, also where the prompt's template has already opened it.
Only the start of the output can open reasoning; reasoning that is never closed is reasoning to the end."""

from outrider.registry import Registry
from outrider.server.parsers.base import Reasoning, Scanner, Steps, Text

SPACES = " \t\r\n"


class ReasoningParser(Scanner):
    open: str
    close: str

    def __init__(self, opened: bool = False) -> None:
        self._opened = opened
        self.thinks = opened  # whether the last character was reasoning
        super().__init__()

    @classmethod
    def marks(cls) -> tuple[str, ...]:
        return cls.open, cls.close

    @classmethod
    def opened_by(cls, prompt: str) -> bool:
        """Whether a prompt ends inside reasoning."""
        return prompt.rstrip().endswith(cls.open)

    def reached(self, marker: str) -> None:
        self.thinks = marker == self.open

    def run(self) -> Steps:
        if not self._opened:
            while self.char and self.char in SPACES:
                self.say(Text, self.char)
                yield from self.advance()
        # some models write the marker again although the prompt ended with it
        if (yield from self.expect(self.open)) or self._opened:
            self.drop()
            if (yield from self.until((self.close,), Reasoning)):
                self.drop()
        yield from self.until(())


reasoning_parsers: Registry[type[ReasoningParser]] = Registry("reasoning parser")


@reasoning_parsers.register("think", "deepseek_r1", "qwen3")
class ThinkParser(ReasoningParser):
    open, close = "<think>", "</think>"


@reasoning_parsers.register("mistral")
class MistralThinkParser(ReasoningParser):
    open, close = "[THINK]", "[/THINK]"
