"""DeepSeek V3 and R1: type, separator, name, then fenced JSON; V3.1: name, separator, then bare JSON.
Both stand between special tokens, and what follows the separator tells them apart."""

from outrider.server.parsers.base import MalformedError, Steps
from outrider.server.parsers.forced import Format, WantedCalls, literal, sequence, tag
from outrider.server.parsers.tool_calls import SPACES, ToolParser, tool_parsers

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
FENCE = "```json"  # in the templates of V3 and R1


@tool_parsers.register("deepseek", "deepseek_v3", "deepseek_v31", "deepseek_r1")
class DeepSeekParser(ToolParser):
    markers = (CALLS_BEGIN, CALL_BEGIN)
    marks = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR)

    @classmethod
    def forced(cls, wanted: WantedCalls) -> Format:
        fenced, separator = FENCE in wanted.template, wanted.mark(SEPARATOR)
        calls = []
        for name in wanted.tools:
            parts = [literal(name), separator, wanted.arguments(name)]
            if fenced:
                before, after = literal(f"{name}\n{FENCE}\n"), literal("\n```")
                parts = [literal("function"), separator, before, wanted.arguments(name), after]
            calls.append(tag(wanted.mark(CALL_BEGIN), sequence(*parts), wanted.mark(CALL_END)))
        return sequence(wanted.mark(CALLS_BEGIN), wanted.listed(calls, "\n" if fenced else ""), wanted.mark(CALLS_END))

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
            yield from self.expect(FENCE, FENCE.upper())
            yield from self.skip(SPACES)
        yield from self.arguments(name)
        yield from self.skip(SPACES + "`}")
        if (yield from self.expect(CALL_END)):
            self.drop()
