"""DeepSeek V3 and R1: type, separator, name, then fenced JSON; V3.1: name, separator, then bare JSON.
Both stand between special tokens, and what follows the separator tells them apart."""

from outrider.server.parsers.base import MalformedError, Steps
from outrider.server.parsers.tool_calls import SPACES, ToolParser, tool_parsers

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"


@tool_parsers.register("deepseek", "deepseek_v3", "deepseek_v31", "deepseek_r1")
class DeepSeekParser(ToolParser):
    markers = (CALLS_BEGIN, CALL_BEGIN)

    def calls(self, marker: str) -> Steps:
        if marker == CALLS_BEGIN:
            yield from self.skip(SPACES)
            if not (yield from self.expect(CALL_BEGIN)):
                raise MalformedError
        while True:
            yield from self.call()
            yield from self.skip(SPACES)
            following = yield from self.expect(CALL_BEGIN, CALLS_END)
            if following != CALL_BEGIN:
                if following:
                    self.drop()
                return

    def call(self) -> Steps:
        yield from self.skip(SPACES)
        name = yield from self.plain_name()
        if not (yield from self.expect(SEPARATOR)):
            raise MalformedError
        yield from self.skip(SPACES)
        if self.char != "{":  # what came first was the type: "function"
            name = yield from self.plain_name()
            yield from self.skip(SPACES)
            yield from self.expect("```json", "```JSON")
            yield from self.skip(SPACES)
        yield from self.arguments(name)
        yield from self.skip(SPACES + "`}")
        if (yield from self.expect(CALL_END)):
            self.drop()
