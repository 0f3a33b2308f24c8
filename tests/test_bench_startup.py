"""`outrider bench startup`: real processes, started cold and warm, whose parts add up."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from rich.console import Console
from test_bench_round import SHAPE
from typer.testing import CliRunner

from outrider import LLM
from outrider.bench.random_pair import random_engine
from outrider.bench.startup import PARTS, Started, Starts, show_card, start, to_dict
from outrider.bench.startup_child import read_config
from outrider.cli import app
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.kernels import native_library
from outrider.startup import StartupTimes

SETTING = {"model": "tiny", "drafter": "ngram", "weights": "real", "device": "cpu", "max_num_seqs": 2}


def test_a_start_and_another_one(target_path: Callable[..., Path], tmp_path: Path) -> None:
    """Two processes with one cache directory: what the first has compiled, the second finds."""
    settings = SpeculativeConfig(method="ngram", num_speculative_tokens=3)
    config = EngineConfig(target_path(), settings, device="cpu", max_model_len=64, max_num_seqs=2, threads=1)
    cold = start(config, None, tmp_path)
    compiled = {path: path.stat().st_mtime_ns for path in (tmp_path / "outrider").glob("native-*")}
    warm = start(config, None, tmp_path)
    assert compiled or native_library.library() is None, "kernels were not compiled in the directory"
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "outrider").iterdir()} == compiled
    for each in (cold, warm):
        assert set(each.parts) == set(PARTS)
        assert 0 < each.parts["interpreter"] < each.ready < each.first_token
        assert each.parts["imports"] > 0.05  # torch among them
        assert each.parts["weights"] > 0
        assert each.parts["check-up"] > 0
        assert -0.01 <= each.rest < 0.5 * each.ready
        assert (each.num_recordings, each.num_kernels) == (0, 0)


def test_the_command_starts_random_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    given = ["--shape", str(tmp_path / "config.json"), "--draft", "eagle3", "--device", "cpu", "--threads", "1"]
    result = CliRunner().invoke(app, ["bench", "startup", *given])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.strip().splitlines()[-1])
    assert (report["weights"], report["drafter"], report["num_runs"]) == ("random", "eagle3", 1)
    for name in ("cold", "warm"):
        found = report[name]
        assert sum(found["parts"].values()) == pytest.approx(found["ready_seconds"], abs=0.01)
        assert found["ready_seconds"] < found["first_token_seconds"]
        assert f"{name}: ready after" in result.stderr
    assert "imports" in result.stdout


def test_what_a_process_said_that_did_not_start(tmp_path: Path) -> None:
    config = EngineConfig(tmp_path / "nothing", device="cpu")
    with pytest.raises(ValueError, match=r"the process did not start; it said: .*nothing"):
        start(config, None, tmp_path)


def test_a_configuration_reaches_the_process_as_it_is() -> None:
    settings = SpeculativeConfig(method="ngram", taps=(1, 2), force=True)
    for config in (EngineConfig("model", settings, max_num_seqs=3, exact=True), EngineConfig("model", watchdog=None)):
        assert read_config(json.loads(json.dumps(asdict(config)))) == config


# timing points


def test_an_engine_notes_what_its_parts_took(target_path: Callable[..., Path]) -> None:
    with LLM(target_path(), {"method": "ngram"}, max_model_len=64) as llm:
        assert list(llm.startup.seconds) == ["models", "weights", "cache", "check-up"]
        assert min(llm.startup.seconds.values()) > 0
        llm.warm_up()
        assert llm.startup.seconds["warm-up"] >= 0
    startup = StartupTimes()
    config = EngineConfig("shape", device="cpu", max_model_len=64, max_num_seqs=2)
    random_engine(config, SHAPE, startup).close()
    assert list(startup.seconds) == ["models", "weights", "cache"]


def test_parts_that_come_twice_are_added() -> None:
    times = StartupTimes({"models": 1.0})
    with times.timed("models"):
        pass
    with pytest.raises(ZeroDivisionError), times.timed("weights"):
        _ = 1 / 0
    assert times.seconds["models"] > 1.0
    assert times.seconds["weights"] > 0  # also of what failed


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_recordings_and_kernels_are_counted_on_a_gpu(target_path: Callable[..., Path], tmp_path: Path) -> None:
    config = EngineConfig(target_path(), device="cuda", max_model_len=64, max_num_seqs=2)
    cold, warm = start(config, None, tmp_path), start(config, None, tmp_path)
    assert cold.num_recordings == warm.num_recordings > 0
    assert cold.num_kernels > 0 == warm.num_kernels
    spent = [sum(each.within_warm_up.values()) for each in (cold, warm)]
    assert 0 < spent[1] < spent[0] <= cold.parts["warm-up"]
    assert warm.within_warm_up.keys() == {f"{part} recordings" for part in ("forward", "choose", "draft")}


# the report


def test_medians_of_several_starts() -> None:
    def started(seconds: float) -> Started:
        parts = {"interpreter": 0.1, "imports": seconds, "warm-up": 2 * seconds}
        return Started(4 * seconds, 5 * seconds, parts, {"draft recordings": seconds}, 7, 9, 1)

    report = to_dict(SETTING, Starts([started(3), started(9), started(4)], [started(1)] * 3))
    cold, warm = report["cold"], report["warm"]
    assert (cold["ready_seconds"], cold["first_token_seconds"], warm["ready_seconds"]) == (16, 20, 4)
    assert (cold["parts"]["imports"], cold["parts"]["warm-up"], cold["parts"]["cache"]) == (4, 8, 0)
    assert cold["parts"]["rest"] == pytest.approx(16 - 12.1)
    assert cold["within_warm_up"] == {"draft recordings": 4}
    written = io.StringIO()
    show_card(Console(file=written, width=100), report)
    lines = [line.split() for line in written.getvalue().splitlines()]
    assert ["ready", "16.00", "4.00"] in lines
    assert ["draft", "recordings", "4.00", "1.00"] in lines
    assert "7 recordings; kernels compiled for a GPU: 9 cold, 9 warm, 1 after it was ready" in written.getvalue()
