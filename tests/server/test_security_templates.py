"""Chat templates are code that came with a model: they stay in their sandbox, they end, and they have no rights."""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from running import Serve

import outrider
from outrider import LLM
from outrider.template import Templates

SOURCE = Path(outrider.__file__).parent
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
PATH = "/v1/chat/completions"
ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('id') }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['sys'].exit() }}",
    "{{ (messages|attr('__class__')) }}",
    "{% import 'os' as os %}",
    "{% include '/etc/passwd' %}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ messages.append(1) }}",
]
BOMBS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "recursion": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a power": "{{ (messages | length + 6) ** (10 ** 10) }}",
    "memory": "{% set n = namespace(s='x' * 99) %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "a long text": "{{ 'x'.center(99999999999) }}",
}


@pytest.mark.parametrize("template", ESCAPES)
def test_templates_stay_in_the_sandbox(template: str) -> None:
    templates = Templates({"default": template}, 10_000)
    try:
        assert "subclasses" not in templates.render("default", {"messages": []})
    except ValueError:
        pass
    else:  # what the sandbox passes over, it leaves empty
        assert templates.render("default", {"messages": []}).strip() in ("", "{0.__class__}")


@pytest.mark.parametrize("name", BOMBS)
def test_templates_end(name: str) -> None:
    templates = Templates({"bomb": BOMBS[name], "good": "{{ x }}"}, 10_000, seconds=1.0)
    begin = time.monotonic()
    with pytest.raises(ValueError, match=r"more than|memory|Memory|Overflow|does not parse|too large"):
        templates.render("bomb", {"messages": ["x"]})
    assert time.monotonic() - begin < 10
    assert templates.render("good", {"x": "it goes on"}) == "it goes on"


def test_a_template_has_no_secrets_and_no_rights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Should one get out of the sandbox: its process knows no key, and can neither write nor start anything."""
    monkeypatch.setenv("OUTRIDER_API_KEY", "a-key-of-ours")
    monkeypatch.setattr("outrider.template.WORKER", _escaped(tmp_path))
    templates = Templates({"default": "{{ out() }}"}, 10_000)
    found = json.loads(templates.render("default", {}))
    assert found["key"] is None
    assert found["write"] == "refused"
    assert found["fork"] == "refused" or os.geteuid() == 0  # root may always start processes


def _escaped(folder: Path) -> Path:
    """The worker as it is, with a door in its sandbox."""
    source = (SOURCE / "template_worker.py").read_text()
    door = """
def _out():
    import os
    found = {"key": os.environ.get("OUTRIDER_API_KEY")}
    for name, act in (("write", lambda: os.write(os.open("PLACE", os.O_CREAT | os.O_WRONLY), b"x")), ("fork", os.fork)):
        try:
            found[name] = str(act())
        except OSError:
            found[name] = "refused"
        if found[name] == "0":
            os._exit(0)
    return json.dumps(found)
""".replace("PLACE", str(folder / "written"))
    changed = source.replace("class _GenerationBlock", f"{door}\n\nclass _GenerationBlock")
    changed = changed.replace(
        "    return environment\n", '    environment.globals["out"] = _out\n    return environment\n'
    )
    changed = changed.replace(
        "    _confine()\n", "    import signal\n    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n    _confine()\n"
    )
    (folder / "worker.py").write_text(changed)
    return folder / "worker.py"


def test_a_models_endless_template_over_http(serve: Serve, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert llm.tokenizer is not None
    with serve() as running:
        monkeypatch.setitem(llm.tokenizer._chat.__dict__, "_own", Templates({"default": BOMBS["loops"]}, 10_000, 1.0))
        with ThreadPoolExecutor(4) as pool:
            begin = time.monotonic()
            chats = [pool.submit(running.post, PATH, CHAT) for _ in range(3)]
            assert running.post("/v1/completions", {"prompt": "Hello", "max_tokens": 2}).status_code == 200
            answers = [chat.result() for chat in chats]
            assert {answer.status_code for answer in answers} <= {400, 503}  # it failed, or nobody had time for it
            assert all("retry-after" in answer.headers for answer in answers if answer.status_code == 503)
        assert time.monotonic() - begin < 15
        monkeypatch.undo()
        assert running.post(PATH, CHAT).status_code == 200
