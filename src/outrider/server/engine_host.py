"""Where the engine runs: in a process of its own, as `outrider serve` has it, or in a thread of this one, where tests
reach into it. Either way the front has a link to it, and the same messages go both ways."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

from outrider.options import EngineOptions
from outrider.processes import end_with_parent, freeze_heap
from outrider.server.link import Link
from outrider.server.log import log_to_stderr
from outrider.server.protocol import Loading, Located, NotOpened, Opened

if TYPE_CHECKING:  # they import torch, which the front does without
    from outrider.config import EngineConfig
    from outrider.llm import LLM
    from outrider.training.online import OnlineLearner

OnProgress = Callable[[str, int, int], None]
IGNORED = (signal.SIGINT, signal.SIGTERM)
END_SECONDS = 10.0  # that the engine has after it was told to end


@dataclass(frozen=True)
class Opening:
    """What is to be opened."""

    options: EngineOptions
    settings: dict[str, Any]  # of EngineConfig, beside them
    watchdog: bool
    model_name: str  # what clients call it
    shows_progress: bool = False
    files: dict[str, Any] = field(default_factory=dict)  # where its parts are, in the names of vLLM's LLM
    learn: str | None = None  # where versions of a drafter go that learns from what is said

    def config(self) -> EngineConfig:
        """What was chosen, checked as far as it can be before weights are read. This imports torch."""
        from outrider.config import WatchdogConfig
        from outrider.llm_arguments import settle_files

        model, tokenizer = settle_files(self.options.model, self.files)
        options = replace(self.options, model=None if model is None else str(model))
        watchdog = WatchdogConfig() if self.watchdog else None
        return options.config(**self.settings, tokenizer=tokenizer, watchdog=watchdog)


class ProcessHost:
    """A process that opens the engine and then runs it. It ends with this one, however this one ends."""

    def __init__(self, opening: Opening) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = socket.socketpair()
        self.process = context.Process(target=_main, args=(theirs, opening), name="outrider-engine")
        resource_tracker.ensure_running()  # or start() would do it, and lift what is blocked in the middle
        atexit.register(_kill, self.process)
        with _undisturbed():
            self.process.start()
        theirs.close()  # so that the end of the process is the end of the link
        self.link = Link(ours)

    def opened(self, progress: OnProgress | None, on_located: Callable[[Located], None]) -> Opened:
        """Waits until the engine is ready. `on_located` hears where the target's files are, while weights are read."""
        while True:
            try:
                message = self.link.receive()
            except (EOFError, OSError):
                raise ValueError(f"{self.why_ended()} while it was loading: is there enough memory?") from None
            if isinstance(message, Opened):
                return message
            if isinstance(message, Located):
                on_located(message)
            elif isinstance(message, Loading):
                if progress is not None:
                    progress(message.what, message.done, message.total)
            else:
                assert isinstance(message, NotOpened), message
                _raise(message)

    def why_ended(self) -> str:
        self.process.join(1)
        code = self.process.exitcode
        if code is not None and code < 0:
            return f"the engine's process was ended by {signal.Signals(-code).name}"
        return f"the engine's process has ended with status {code}"

    def close(self) -> None:
        """Waits for its end, or sees to it."""
        self.link.close()
        self.process.join(END_SECONDS)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()

    def kill(self) -> None:
        """Now."""
        self.process.kill()
        self.close()

    def __enter__(self) -> ProcessHost:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            self.kill()
        else:
            self.close()


def _kill(process: BaseProcess) -> None:
    """Whoever is interrupted before it can say goodbye would wait for the process at its own exit, for ever."""
    if process.pid is not None and process.is_alive():
        process.kill()


def _raise(failure: NotOpened) -> None:
    if failure.is_fault:  # as if it had happened here
        sys.stderr.write(failure.trace)
        raise SystemExit(1)
    raise ValueError(failure.message)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """A signal to all processes of a terminal or a service must not end the engine under running requests: the front
    decides. A process that is started meanwhile does not heed them from its first moment on; here, they come later."""
    signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)


# in the process


def _main(end: socket.socket, opening: Opening) -> None:
    for each in IGNORED:
        signal.signal(each, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
    os.set_inheritable(end.fileno(), False)  # whatever is started here must not keep the link open
    end_with_parent()
    link, status = Link(end), 1
    try:
        llm = _open(opening, link)
        if llm is not None:
            status = _run(llm, link, opening)
    except BaseException:
        traceback.print_exc()
    finally:
        link.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # nothing is left to tidy up, and a thread that compiles a grammar is not waited for


def _open(opening: Opening, link: Link) -> LLM | None:
    def progress(what: str, done: int, total: int) -> None:
        link.send(Loading(what, done, total))

    try:
        from outrider.checkpoints.checkpoint import open_checkpoint
        from outrider.llm import LLM
        from outrider.server.learning import check_online

        config = opening.config()
        checkpoint = open_checkpoint(config.model)
        checkpoint.close()
        own = None if config.tokenizer is None else str(config.tokenizer)
        link.send(Located(str(checkpoint.path), own))
        llm = LLM.from_config(config, progress if opening.shows_progress else None)
        llm.warm_up()
        if opening.learn is not None:
            check_online(llm)
        return llm
    except BaseException as error:
        is_fault = not isinstance(error, ValueError | OSError)
        link.send(NotOpened(str(error), is_fault, "".join(traceback.format_exception(error))))
        return None


def _run(llm: LLM, link: Link, opening: Opening) -> int:
    from outrider.server.engine_loop import EngineLoop, opened
    from outrider.server.learning import learner_of

    log_to_stderr()
    learner = learner_of(llm, opening.learn) if opening.learn is not None else None
    loop = EngineLoop(llm, link, opening.model_name, learner)
    freeze_heap()
    link.send(opened(llm))
    return 0 if loop.run() else 1


# in a thread


class ThreadHost:
    """An engine of this process, run by a thread."""

    def __init__(self, llm: LLM, model_name: str, learner: OnlineLearner | None = None) -> None:
        from outrider.server.engine_loop import EngineLoop, opened

        ours, theirs = socket.socketpair()
        self.link, self._theirs = Link(ours), Link(theirs)
        self.loop, self.model = EngineLoop(llm, self._theirs, model_name, learner), opened(llm)
        self._thread = threading.Thread(target=self._run, name="outrider-engine", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.loop.run()
        self._theirs.close()

    def why_ended(self) -> str:
        return "the engine's thread has ended"

    def close(self) -> None:
        self.link.close()
        self._thread.join(END_SECONDS)
