"""`outrider bench siege`: one attack after the other on a server, while others use it. The server must live, and nobody
else may wait long, be refused, or get another answer."""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

from outrider.bench.interleave import Progress
from outrider.bench.load.server_process import server_process
from outrider.bench.load.siege_attacks import ATTACKS, Attack, Siege
from outrider.bench.load.siege_victims import PLAIN, Address, Seen, request, victims

MAX_CONTEXT = "1024"  # of a server of our own
AFTER_SECONDS = 1.0  # that the others are watched for after an attack
SETTLE_SECONDS = 30.0


@dataclass(frozen=True)
class Bounds:
    plain: float = 2.0  # seconds, for the slowest request of others
    health: float = 0.5
    memory: int = 1536 * 2**20  # bytes more than before


@dataclass
class Assault:
    """What one attack did."""

    name: str
    answers: dict[str, int]  # what the attackers got
    num_others: int  # requests of others meanwhile
    plain: float
    health: float
    memory: int | None  # bytes more than before, at most
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class BesiegedServer:
    address: Address
    memory: Callable[[], int] | None = None  # resident bytes, where they can be seen


@contextmanager
def own_server(arguments: Sequence[str] = (), threads: int | None = None) -> Iterator[BesiegedServer]:
    """The embedded model."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with server_process(["--max-model-len", MAX_CONTEXT, *arguments], log, threads) as server:
            address = Address(server.host, server.port, None, None, has_chat=True)
            yield BesiegedServer(address, lambda: server.memory)


def running_server(base_url: str, api_key: str | None, model: str | None) -> BesiegedServer:
    parts = urlsplit(base_url if "//" in base_url else f"http://{base_url}")
    if parts.scheme != "http" or not parts.hostname:
        raise ValueError(f"--base-url must be an http:// address, not {base_url!r}")
    address = Address(parts.hostname, parts.port or 80, api_key, model, has_chat=False)
    alive = request(address, "GET", "/health/live", timeout=10)
    if alive.status != 200:
        raise ValueError(f"no server answers at {base_url}: {alive.text[:200] or alive.status}")
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    chats = request(address, "POST", "/v1/chat/completions", json.dumps(body).encode()).status == 200
    return BesiegedServer(address._replace(has_chat=chats))


def besiege(
    target: BesiegedServer,
    seconds: float,
    bounds: Bounds,
    attacks: Sequence[Attack] = ATTACKS,
    progress: Progress | None = None,
) -> list[Assault]:
    expected = _plain_text(target)
    found = []
    with victims(target.address) as others:
        for number, attack in enumerate(attacks):
            if progress is not None:
                progress(attack.name, number, len(attacks))
            others.seen()
            before = target.memory() if target.memory is not None else 0
            with _watched_memory(target) as memory:
                siege = Siege(target.address, time.monotonic() + seconds)
                attack.run(siege)
                time.sleep(min(AFTER_SECONDS, seconds))
                seen = others.seen()
            grown = max(memory, default=before) - before if target.memory is not None else None
            found.append(assault_of(attack.name, siege, seen, grown))
            found[-1].failures += judge(found[-1], seen, bounds) + _after(target, expected)
    return found


def assault_of(name: str, siege: Siege, seen: Seen, grown: int | None) -> Assault:
    others = [each for kind, measured in seen.found.items() if kind != "health" for each in measured]
    return Assault(
        name=name,
        answers=dict(sorted(siege.answers.items())),
        num_others=len(others),
        plain=max((each.seconds for each in others), default=0.0),
        health=seen.worst("health"),
        memory=grown,
    )


def judge(found: Assault, seen: Seen, bounds: Bounds) -> list[str]:
    """What others suffered."""
    failures = []
    if not found.num_others or not seen.found.get("health"):
        failures.append("nobody else was served meanwhile")
    if found.plain > bounds.plain:
        failures.append(f"a plain request took {found.plain:.1f} s")
    if found.health > bounds.health:
        failures.append(f"health took {found.health:.2f} s")
    if found.memory is not None and found.memory > bounds.memory:
        failures.append(f"memory grew by {found.memory / 2**20:.0f} MiB")
    for kind in seen.found:
        refused = seen.failures(kind)
        if refused:
            failures.append(
                f"{len(refused)} of others' {kind} requests failed: {refused[0].status} {refused[0].text[:100]}"
            )
    return failures


def _after(target: BesiegedServer, expected: str) -> list[str]:
    """Whether the server is as it was, once it has had time to."""
    end = time.monotonic() + SETTLE_SECONDS
    while True:
        text = _plain_text(target)
        if text == expected:
            return []
        if time.monotonic() > end:
            return [f"afterwards an answer is another: {text[:100]!r}"]
        time.sleep(0.5)


def _plain_text(target: BesiegedServer) -> str:
    named = {} if target.address.model is None else {"model": target.address.model}
    answer = request(target.address, "POST", "/v1/completions", json.dumps(PLAIN | named).encode())
    if answer.status != 200:
        return f"status {answer.status}"
    return str(json.loads(answer.text)["choices"][0]["text"])


@contextmanager
def _watched_memory(target: BesiegedServer) -> Iterator[list[int]]:
    found: list[int] = []
    ended = threading.Event()

    def watch() -> None:
        while target.memory is not None and not ended.wait(0.1):
            found.append(target.memory())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


def to_dict(found: Sequence[Assault], bounds: Bounds) -> dict[str, Any]:
    return {
        "bounds": vars(bounds),
        "attacks": [vars(each) for each in found],
        "good": not any(each.failures for each in found),
    }


def show(console: Console, found: Sequence[Assault], bounds: Bounds) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("attack", "attackers got", "others", "slowest", "health", "memory", ""):
        table.add_column(name, justify="left" if name in ("attack", "attackers got", "") else "right")
    for each in found:
        answers = ", ".join(f"{count} x {what}" for what, count in each.answers.items())
        memory = "-" if each.memory is None else f"+{max(each.memory, 0) / 2**20:.0f} MiB"
        verdict = "held" if not each.failures else "FAILED"
        figures = (str(each.num_others), f"{each.plain:.2f} s", f"{each.health:.3f} s", memory)
        table.add_row(each.name, answers, *figures, verdict)
    console.print(table)
    for each in found:
        for failure in each.failures:
            console.print(f"FAILED: {each.name}: {failure}", markup=False, highlight=False, soft_wrap=True)
    limits = f"{bounds.plain:g} s, health {bounds.health:g} s, {bounds.memory / 2**20:.0f} MiB"
    console.print(f"bounds: others' requests {limits}", highlight=False, soft_wrap=True)
