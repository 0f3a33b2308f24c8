"""Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, and from tokeniser 11 on
`[TOOL_CALLS]name[ARGS]{...}`, with `[CALL_ID]id` after the name where the template asks for it."""

from outrider.server.parsers.base import MalformedError, Steps
from outrider.server.parsers.forced import Format, WantedCalls, json_call, literal, sequence, tag
from outrider.server.parsers.tool_calls import ID_LEN, SPACES, ToolParser, short_id, tool_parsers

TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


@tool_parsers.register("mistral")
class MistralParser(ToolParser):
    markers = (TOOL_CALLS,)
    marks = (TOOL_CALLS, CALL_ID, ARGS)
    default_id = staticmethod(short_id)

    @classmethod
    def forced(cls, wanted: WantedCalls) -> Format:
        begin = wanted.mark(TOOL_CALLS)
        if ARGS not in wanted.special_ids:
            calls = wanted.listed([json_call(wanted, name, "arguments") for name in wanted.tools], ", ")
            return sequence(begin, literal("["), calls, literal("]"))
        named = (sequence(literal(name), wanted.mark(ARGS), wanted.arguments(name)) for name in wanted.tools)
        return wanted.listed([tag(begin, call, literal("")) for call in named], "")

    def calls(self, marker: str) -> Steps:
        yield from self.skip(SPACES)
        if self.char == "{":
            yield from self.envelope()
        elif self.char == "[":
            yield from self.array()
        else:
            yield from self.named()

    def array(self) -> Steps:
        yield from self.hold()
        while True:
            yield from self.skip(SPACES)
            yield from self.envelope()
            yield from self.skip(SPACES)
            if self.char == "]":
                yield from self.hold()
                self.drop()
                return
            if self.char != ",":
                raise MalformedError
            yield from self.hold()

    def named(self) -> Steps:
        name = yield from self.plain_name()
        id: str | None = None
        if (yield from self.expect(CALL_ID)):
            id = yield from self.plain_name()
            if not (len(id) == ID_LEN and id.isascii() and id.isalnum()):
                id = None  # templates would refuse it; a good one is kept, so that the next prompt repeats the answer
        yield from self.expect(ARGS)
        yield from self.skip(SPACES)
        yield from self.arguments(name, id)
