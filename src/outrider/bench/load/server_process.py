"""`outrider serve` as a process of its own: started on a free port, watched, asked about, and ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

START_SECONDS = 300.0
END_SECONDS = 20.0


@dataclass
class ServerProcess:
    process: subprocess.Popen[bytes]
    port: int
    log: Path  # its standard error

    @property
    def host(self) -> str:
        return "127.0.0.1"

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return str(answer.read().decode())

    @property
    def pids(self) -> list[int]:
        """Ids of the server's processes: HTTP, the engine, and what they have started."""
        parents = {int(entry.name): _parent(entry) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
        found = [self.process.pid]
        for pid in found:  # which grows meanwhile
            found += [child for child, parent in parents.items() if parent == pid]
        return found

    def _sum(self, measure: Callable[[Path], float]) -> float:
        """Over all processes; one that has just ended has nothing."""
        total = 0.0
        for pid in self.pids:
            with suppress(OSError):
                total += measure(Path(f"/proc/{pid}"))
        return total

    @property
    def memory(self) -> int:
        """Resident bytes."""
        pages = self._sum(lambda entry: int((entry / "statm").read_text().split()[1]))
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    @property
    def num_files(self) -> int:
        return int(self._sum(lambda entry: len(os.listdir(entry / "fd"))))

    @property
    def num_threads(self) -> int:
        return int(self._sum(lambda entry: len(os.listdir(entry / "task"))))

    @property
    def cpu_seconds(self) -> float:
        return self._sum(lambda entry: sum(map(int, _stat(entry)[11:13]))) / os.sysconf("SC_CLK_TCK")

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """And waits until the engine's process has ended too: whoever comes next may want its memory."""
        pids = self.pids
        self.process.kill()
        self.process.wait()
        end = time.monotonic() + END_SECONDS
        while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < end:
            time.sleep(0.02)

    def wait_until_ready(self) -> None:
        end = time.monotonic() + START_SECONDS
        while not self._is_ready():
            if self.process.poll() is not None or time.monotonic() > end:
                lines = self.log.read_text(errors="replace").splitlines()
                raise ValueError(f"the server did not start; it said: {' '.join(lines[-3:]) or 'nothing'}")
            time.sleep(0.05)

    def _is_ready(self) -> bool:
        try:
            return bool(self.get("/health/ready"))
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False


@contextmanager
def server_process(arguments: Sequence[str], log: Path, threads: int | None = None) -> Iterator[ServerProcess]:
    """`arguments` go to `outrider serve`; `threads` is how many it computes with."""
    if not Path("/proc/self/statm").exists():
        raise ValueError("watching a server's memory and file handles needs Linux (/proc)")
    port = _free_port()
    counted = ["--threads", str(threads)] if threads is not None else []
    command = [sys.executable, "-m", "outrider", "serve", "--port", str(port), *counted, *arguments]
    environment = dict(os.environ)
    environment.pop("OUTRIDER_API_KEY", None)
    with log.open("wb") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr, env=environment)
    server = ServerProcess(process, port, log)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.kill()


def _stat(entry: Path) -> list[str]:
    """What /proc says of a process after its name."""
    return (entry / "stat").read_text().rpartition(")")[2].split()


def _parent(entry: Path) -> int:
    try:
        return int(_stat(entry)[1])
    except OSError:  # it has ended
        return 0


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
