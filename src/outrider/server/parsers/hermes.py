"""Hermes, Qwen 2.5 and Qwen 3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one pair of tags a call.
A forgotten brace or closing tag, or a brace too many before the tag, does not lose the call."""

from outrider.server.parsers.base import Steps
from outrider.server.parsers.forced import Format, WantedCalls, json_call, literal, sequence, tag
from outrider.server.parsers.tool_calls import SPACES, ToolParser, tool_parsers

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@tool_parsers.register("hermes", "qwen")
class HermesParser(ToolParser):
    markers = (OPEN,)
    marks = (OPEN, CLOSE)

    @classmethod
    def forced(cls, wanted: WantedCalls) -> Format:
        line = literal("\n")
        calls = (sequence(line, json_call(wanted, name, "arguments"), line) for name in wanted.tools)
        return wanted.listed([tag(wanted.mark(OPEN), call, wanted.mark(CLOSE)) for call in calls], "\n")

    def calls(self, marker: str) -> Steps:
        yield from self.skip(SPACES)
        yield from self.envelope()
        yield from self.skip(SPACES + "}")
        if (yield from self.expect(CLOSE)):
            self.drop()
