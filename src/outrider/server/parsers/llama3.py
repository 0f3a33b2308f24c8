"""Llama 3.1 to 3.3 and 4: `{"name": ..., "parameters": {...}}`, with or without `<|python_tag|>` before it.
Several calls are separated by `;`. Without the tag, only JSON that opens the answer can be a call."""

from outrider.server.parsers.base import Steps, Text
from outrider.server.parsers.forced import Format, WantedCalls, json_call
from outrider.server.parsers.tool_calls import SPACES, ToolParser, tool_parsers

PYTHON_TAG = "<|python_tag|>"


@tool_parsers.register("llama3", "llama3_json", "llama4_json")
class Llama3Parser(ToolParser):
    markers = (PYTHON_TAG,)
    marks = (PYTHON_TAG,)

    @classmethod
    def forced(cls, wanted: WantedCalls) -> Format:
        """Without the tag, as the model is used to: that announces its built-in tools."""
        return wanted.listed([json_call(wanted, name, "parameters") for name in wanted.tools], "; ")

    def run(self) -> Steps:
        while self.char and self.char in SPACES:
            self.say(Text, self.char)
            yield from self.advance()
        if self.char == "{":
            yield from self.attempt(self.calls(""))
        yield from super().run()

    def calls(self, marker: str) -> Steps:
        unmarked = not marker
        yield from self.skip(SPACES)
        while True:
            yield from self.envelope(unmarked)
            yield from self.skip(SPACES + ";")
            if (yield from self.expect(PYTHON_TAG)):
                unmarked = False
            yield from self.skip(SPACES)
            if self.char != "{":
                return
