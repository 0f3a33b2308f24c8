"""The number of threads follows what other programs leave, unless somebody has set it."""

from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from typer.testing import CliRunner

from outrider import LLM, SamplingParams
from outrider import threads as module
from outrider.certify.proof import threads_for
from outrider.cli import app
from outrider.config import EngineConfig
from outrider.threads import Threads, Usage, allowed_processors, busy_seconds, spare_threads

#        user nice system idle iowait irq softirq steal guest guest_nice
STAT = """cpu  600 0 0 600 0 0 0 0 0 0
cpu0 100 10 20 1000 500 1 2 3 50 10
cpu1 200 0 0 0 0 0 0 0 0 0
cpu12 300 0 0 0 0 0 0 0 0 0
intr 1 2 3
"""


class Machine:
    """Time passes, and others use processors."""

    def __init__(self) -> None:
        self.usage = Usage(0.0, 0.0, 0.0)

    def pass_time(self, seconds: float, others: float) -> None:
        own = seconds * torch.get_num_threads()
        usage = self.usage
        everybody = usage.everybody + own + seconds * others
        self.usage = Usage(usage.moment + seconds, everybody, usage.own + own)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    machine, before = Machine(), torch.get_num_threads()
    monkeypatch.setattr(module, "current_usage", lambda: machine.usage)
    monkeypatch.setattr(module.time, "monotonic", lambda: machine.usage.moment)
    monkeypatch.setattr(module, "allowed_processors", lambda: None)
    monkeypatch.setattr(module, "current_load", lambda: 0.0)
    torch.set_num_threads(4)
    yield machine
    torch.set_num_threads(before)


def test_processor_time_is_read_for_our_processors() -> None:
    tick = 1 / 100
    assert busy_seconds(STAT, {0}) == pytest.approx(136 * tick)
    assert busy_seconds(STAT, {0, 1}) == pytest.approx(336 * tick)
    assert busy_seconds(STAT, {12, 99}) == pytest.approx(300 * tick)


@pytest.mark.parametrize(
    ("most", "others", "expected"), [(2, 0.0, 2), (2, 0.2, 2), (2, 0.5, 1), (2, 2.0, 1), (8, 1.0, 7), (1, 0.0, 1)]
)
def test_others_take_threads(most: int, others: float, expected: int) -> None:
    assert spare_threads(most, others) == expected


def test_threads_are_given_up_and_come_back(machine: Machine) -> None:
    threads = Threads()
    threads.adapt()
    for others, expected in ((0.0, 4), (1.0, 3), (2.6, 1), (0.1, 4)):
        machine.pass_time(module.INTERVAL, others)
        threads.adjust()
        assert torch.get_num_threads() == expected
    machine.pass_time(module.INTERVAL / 2, 3.0)  # too short to tell
    threads.adjust()
    assert torch.get_num_threads() == 4


def test_a_number_that_somebody_has_set_stays(machine: Machine) -> None:
    threads = Threads()
    threads.adapt()
    torch.set_num_threads(3)
    machine.pass_time(1.0, 4.0)
    threads.adjust()
    assert torch.get_num_threads() == 3
    threads.fix(2)
    threads.adapt()  # by another model of the same process
    machine.pass_time(1.0, 4.0)
    threads.adjust()
    assert torch.get_num_threads() == 2
    for wrong in (0, True, 1.5):
        with pytest.raises(ValueError, match="threads must be"):
            threads.fix(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("content", "expected"),
    [("0.02 0.5 0.7 3/412 99\n", 0.02), ("4.10 2.0 1.0 3/412 99\n", 2.0), ("4.10 2.0 1.0 1/412 99\n", 0.0), ("?", 0.0)],
)
def test_the_load_at_the_start(content: str, expected: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROC_LOAD", tmp_path / "loadavg")
    assert module.current_load() == 0.0
    (tmp_path / "loadavg").write_text(content)
    assert module.current_load() == expected


def test_a_busy_machine_is_seen_at_once(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "current_load", lambda: 2.0)
    threads = Threads()
    threads.adapt()
    assert torch.get_num_threads() == 2
    machine.pass_time(module.INTERVAL, 0.0)
    threads.adjust()
    assert torch.get_num_threads() == 4


@pytest.mark.parametrize(("content", "expected"), [("max 100000", None), ("150000 100000", 1), ("250000 100000", 2)])
def test_a_container_has_a_limit(
    content: str, expected: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CPU_MAX", tmp_path / "cpu.max")
    assert allowed_processors() is None
    (tmp_path / "cpu.max").write_text(content + "\n")
    assert allowed_processors() == expected


def test_the_limit_of_a_container_is_kept(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "allowed_processors", lambda: 2)
    Threads().adapt()
    assert torch.get_num_threads() == 2


def test_every_pass_looks_at_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Threads] = []
    with LLM(None, None, max_num_seqs=1) as llm:
        monkeypatch.setattr(Threads, "adjust", lambda self: looks.append(self))
        llm.generate("Once", SamplingParams(max_tokens=5, ignore_eos=True))
    assert len(looks) == 5


@pytest.mark.parametrize(
    "command",
    [
        ["generate", "Once"],
        ["chat"],
        ["serve", "--port", "0"],
        ["certify"],
        ["doctor"],
        ["bench", "latency"],
        ["bench", "throughput"],
        ["bench", "overhead"],
    ],
    ids=" ".join,
)
def test_every_command_takes_threads(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int | None] = []

    def opened(config: EngineConfig, *_: object) -> NoReturn:
        given.append(config.threads)
        raise ValueError("enough was seen")

    monkeypatch.setattr(Threads, "fix", lambda self, count: None)
    monkeypatch.setattr("outrider.llm.open_pair", opened)
    start = "outrider.server.engine_host.ProcessHost.__init__"
    monkeypatch.setattr(start, lambda host, opening: opened(opening.config()))
    for expected in (3, 2):
        result = CliRunner().invoke(app, [*command, "--threads", str(expected)])
        assert "enough was seen" in result.output
    assert given == [3, 2]
    assert CliRunner().invoke(app, [*command, "--threads", "0"]).exit_code == 2


def test_one_thread_proves_small_models_unless_told_otherwise(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = Threads()
    monkeypatch.setattr("outrider.certify.proof.threads", threads)
    threads.adapt()
    with threads_for(1000):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 4
    with threads_for(1000, chosen=2):  # for the engine that is opened within
        assert torch.get_num_threads() == 4
    threads.fix(3)
    with threads_for(1000):
        assert torch.get_num_threads() == 3


def test_a_model_can_be_given_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.pair.threads", Threads())
    before = torch.get_num_threads()
    try:
        with LLM(None, None, threads=3):
            assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
