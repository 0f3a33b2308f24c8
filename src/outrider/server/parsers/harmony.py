"""gpt-oss: messages on channels, `<|channel|>analysis<|message|>...<|end|>`, later ones after `<|start|>assistant`;
a call is one to a function, `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`."""

import re

from outrider.server.parsers.base import MalformedError, Reasoning, Steps, StepsTo, Text
from outrider.server.parsers.forced import Format, WantedCalls
from outrider.server.parsers.reasoning import ReasoningParser, reasoning_parsers
from outrider.server.parsers.tool_calls import SPACES, ToolParser, tool_parsers

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
CALL_HEAD = f"{CHANNEL}commentary to=functions."
MAX_HEAD_LEN = 512
_ENDS = (END, RETURN, CALL, START)
_FUNCTION = re.compile(r"to=functions\.([\w.:/-]+)")


@reasoning_parsers.register("harmony", "openai_gptoss")
class HarmonyParser(ReasoningParser):
    """Says what is on the analysis channel as reasoning, messages to the user as text, and calls as text in the one
    way of writing them that the tool parser reads."""

    open, close = "", f"{CHANNEL}final{MESSAGE}"

    @classmethod
    def marks(cls) -> tuple[str, ...]:
        return START, CHANNEL, CONSTRAIN, MESSAGE, END, RETURN, CALL

    @classmethod
    def opened_by(cls, prompt: str) -> bool:
        return False

    def reached(self, marker: str) -> None:
        self.thinks = False

    def run(self) -> Steps:
        marker = yield from self.until((START, CHANNEL))
        while marker:
            try:
                marker = yield from self.message(marker)
            except MalformedError:
                self.release()
                marker = ""
            if marker != START:
                marker = yield from self.until((START, CHANNEL))

    def message(self, head: str) -> StepsTo:
        """One message, of which the first marker has been read; returns the marker that ended it."""
        while not head.endswith(MESSAGE):
            if not self.char or len(head) > MAX_HEAD_LEN:
                raise MalformedError
            head += self.char
            self.thinks = _is_analysis(head)
            yield from self.hold()
        is_analysis, function = self.thinks, _FUNCTION.search(head)
        self.drop()
        if function is not None:
            self.say(Text, f"{CALL_HEAD}{function[1]}{MESSAGE}")
        ending = yield from self.until(_ENDS, Reasoning if is_analysis else Text)
        self.drop()
        if function is not None and ending:
            self.say(Text, CALL)
        return ending


def _is_analysis(head: str) -> bool:
    return f"{CHANNEL}analysis" in head and head.endswith(MESSAGE) and _FUNCTION.search(head) is None


@tool_parsers.register("harmony", "openai")
class HarmonyCallParser(ToolParser):
    markers = (CALL_HEAD,)
    marks = HarmonyParser.marks()

    @classmethod
    def forced(cls, wanted: WantedCalls) -> Format:
        raise ValueError("a call cannot be forced in the harmony form: use tool_choice auto")

    def calls(self, marker: str) -> Steps:
        name = yield from self.plain_name()
        while not (yield from self.expect(MESSAGE)):
            if not self.char or self.num_held > MAX_HEAD_LEN:
                raise MalformedError
            yield from self.hold()
        yield from self.skip(SPACES)
        yield from self.arguments(name)
        yield from self.skip(SPACES)
        if (yield from self.expect(CALL, END)):
            self.drop()
