"""A short siege of the real server, with room for a busy machine; and that a siege which hurt somebody is told."""

import json
from collections import Counter
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from outrider.bench.load import siege as siege_module
from outrider.bench.load.siege import (
    Assault,
    BesiegedServer,
    Bounds,
    assault_of,
    besiege,
    judge,
    own_server,
    running_server,
    to_dict,
)
from outrider.bench.load.siege_attacks import ATTACKS, Attack, Siege
from outrider.bench.load.siege_victims import Address, Measured, Seen
from outrider.cli import app

BUSY = Bounds(plain=10.0, health=5.0)  # other tests run beside it


@pytest.fixture(scope="module")
def target() -> Iterator[BesiegedServer]:
    with own_server(["--max-num-seqs", "8"], threads=1) as target:
        yield target


def test_a_short_siege(target: BesiegedServer) -> None:
    found = besiege(target, 0.3, BUSY)
    assert [(each.name, each.failures) for each in found if each.failures] == []
    assert len(found) == len(ATTACKS)
    assert all(each.answers and each.num_others for each in found)
    assert all(each.memory is not None for each in found)


def test_a_server_that_suffers(target: BesiegedServer) -> None:
    """What the attackers get shows that others waited: nothing is so quick as these bounds."""
    (found,) = besiege(target, 0.1, Bounds(plain=1e-4, health=1e-4), [ATTACKS[0]])
    assert len(found.failures) == 2
    report = to_dict([found], BUSY)
    assert not report["good"]
    assert json.loads(json.dumps(report)) == report


def seen(**changes: Measured) -> Seen:
    well = {kind: Measured(0.0, 0.1, 200, "") for kind in ("health", "plain", "chat")}
    return Seen({kind: [measured] for kind, measured in (well | changes).items()})


@pytest.mark.parametrize(
    ("found", "grown", "words"),
    [
        (seen(), 0, []),
        (seen(plain=Measured(0.0, 2.1, 200, "")), 0, ["a plain request took 2.1 s"]),
        (seen(health=Measured(0.0, 0.6, 200, "")), 0, ["health took 0.60 s"]),
        (seen(), 2 * 2**30, ["memory grew by 2048 MiB"]),
        (seen(chat=Measured(0.0, 0.1, 400, "no")), 0, ["1 of others' chat requests failed: 400 no"]),
        (seen(plain=Measured(0.0, 0.1, 0, "refused")), 0, ["plain requests failed: 0 refused"]),
        (Seen({}), 0, ["nobody else was served"]),
    ],
)
def test_what_counts_as_suffering(found: Seen, grown: int, words: list[str]) -> None:
    siege = Siege(Address("127.0.0.1", 1, None, None, has_chat=True), 0.0, Counter({"400": 3}))
    failures = judge(assault_of("test", siege, found, grown), found, Bounds())
    assert len(failures) == len(words)
    for failure, word in zip(failures, words, strict=True):
        assert word in failure


def test_an_answer_that_changes(target: BesiegedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(siege_module, "SETTLE_SECONDS", 0.1)
    assert siege_module._after(target, "something else")
    assert not siege_module._after(target, siege_module._plain_text(target))


def test_the_command(target: BesiegedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"http://127.0.0.1:{target.address.port}"
    assert running_server(url, None, None).address.has_chat
    monkeypatch.setattr(siege_module, "besiege", lambda *given, **options: [_assault()])
    good = CliRunner().invoke(app, ["bench", "siege", "--base-url", url])
    assert good.exit_code == 0
    assert "held" in good.output
    monkeypatch.setattr(siege_module, "besiege", lambda *given, **options: [_assault("health took 9 s")])
    bad = CliRunner().invoke(app, ["bench", "siege", "--base-url", url])
    assert bad.exit_code == 1
    assert "FAILED: test: health took 9 s" in bad.output


def _assault(*failures: str) -> Assault:
    return Assault("test", {"400": 3}, 9, 0.1, 0.1, None, list(failures))


def test_attacks_have_names_of_their_own() -> None:
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS) >= 15
    assert all(isinstance(attack, Attack) for attack in ATTACKS)
