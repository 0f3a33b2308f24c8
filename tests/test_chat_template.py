"""Conversations become prompts the same way offline and on the server, and no option is without effect."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny

from outrider import LLM, SamplingParams
from outrider.chat_template import ChatOptions, plain_messages
from outrider.server.chat import messages_of
from outrider.server.schema import ChatRequest

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}"
    "{% for call in m.tool_calls or [] %}[{{ call.function.arguments.x }}]{% endfor %}</>{% endfor %}"
    "{% if tools %}tools {{ tools | length }}{% endif %}{% if mood %}{{ mood }}{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ASKED = [{"role": "user", "content": "hello"}]
SHORT = SamplingParams(max_tokens=2, temperature=0)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path: Path = tiny.save_target(tmp_path_factory.mktemp("chat"), "llama")
    tiny.save_tokenizer(path)
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    with LLM(path, None, max_model_len=256) as made:
        yield made


def prompt(llm: LLM, messages: Any = ASKED, **options: Any) -> str | None:
    return llm.chat(messages, SHORT, **options)[0].prompt


def test_every_option_has_its_effect(llm: LLM) -> None:
    assert prompt(llm) == "<user>hello</><assistant>"
    assert prompt(llm, add_generation_prompt=False) == "<user>hello</>"
    assert prompt(llm, chat_template="given: {{ messages[0].content }}") == "given: hello"
    assert prompt(llm, tools=[{"type": "function"}] * 2) == "<user>hello</>tools 2<assistant>"
    assert prompt(llm, chat_template_kwargs={"mood": "calm"}) == "<user>hello</>calm<assistant>"
    assert prompt(llm) == "<user>hello</><assistant>", "a template that was given once is not kept"


def test_an_unknown_option_is_refused(llm: LLM) -> None:
    for name in ("mood", "add_generation_promt", "enable_thinking"):
        with pytest.raises(ValueError, match=name):
            llm.chat(ASKED, SHORT, **{name: True})
    for name in ("messages", "tools", "add_generation_prompt", "chat_template"):
        with pytest.raises(ValueError, match=f"holds {name}"):
            llm.chat(ASKED, SHORT, chat_template_kwargs={name: "x"})
    with pytest.raises(ValueError, match="given chat_template does not parse"):
        llm.chat(ASKED, SHORT, chat_template="{% for")


def test_the_last_message_goes_on(llm: LLM) -> None:
    """Also where its text stands elsewhere too, is part of the template, or ends with a space that is trimmed."""
    for content in ("Once upon a", "hello", "</>", "a</>", "ends with a space "):
        begun = [*ASKED, {"role": "assistant", "content": content}]
        made = prompt(llm, begun, add_generation_prompt=False, continue_final_message=True)
        assert made == f"<user>hello</><assistant>{content}"
    with pytest.raises(ValueError, match="set add_generation_prompt to false"):
        llm.chat(ASKED, SHORT, continue_final_message=True)
    options = ChatOptions(add_generation_prompt=False, continue_final_message=True)
    for last in ({"role": "assistant"}, {"role": "assistant", "content": [{"type": "image"}]}):
        with pytest.raises(ValueError, match="whose content is text"):
            llm.tokenizer.chat([*ASKED, last], options)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="leaves the last message out"):
        llm.chat(ASKED, SHORT, chat_template="x", add_generation_prompt=False, continue_final_message=True)


def test_text_in_parts_is_text(llm: LLM) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    assert prompt(llm, [{"role": "user", "content": parts}]) == "<user>hello</><assistant>"
    assert prompt(llm, [{"role": "user", "content": ["hel", parts[1]]}]) == "<user>hello</><assistant>"
    mixed = [{"type": "image"}, {"type": "text", "text": "a"}]
    assert plain_messages([{"content": mixed}]) == [{"content": mixed}], "templates for images want the parts"
    for bad in ([{"type": "input_audio"}], [{"type": "text"}], [3], [{"text": "a"}]):
        with pytest.raises(ValueError, match="holds a part of type"):
            prompt(llm, [{"role": "user", "content": bad}])
    with pytest.raises(ValueError, match="must be a mapping"):
        llm.tokenizer.chat(["hello"])  # type: ignore[union-attr, list-item]


def test_arguments_of_calls_are_objects(llm: LLM) -> None:
    def called(arguments: Any) -> list[dict[str, Any]]:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        return [{"role": "assistant", "content": "", "tool_calls": [call]}]

    assert prompt(llm, called('{"x": 3}')) == prompt(llm, called({"x": 3})) == "<assistant>[3]</><assistant>"
    with pytest.raises(ValueError, match="not valid JSON"):
        prompt(llm, called("{"))


def test_the_server_makes_the_same_prompt(llm: LLM) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 3}'}}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "tool_calls": calls}]
    sent = ChatRequest.model_validate({"messages": messages})
    offline = [messages[0], {**messages[1], "content": ""}]
    assert llm.chat_prompt(messages_of(sent.messages)) == llm.chat_prompt(offline)
