"""Grammars are tried out before they are used: compiled, and followed for a while, in a process of its own with limits
of time and memory, that is killed when it exceeds them. What passes takes the same time and memory where it is used.
This file is both ends."""

from __future__ import annotations

import ctypes
import hashlib
import multiprocessing
import os
import random
import signal
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.grammar.compiler import GrammarCompiler, Words, grammar_text, import_xgrammar
from outrider.overload import OverloadError
from outrider.processes import end_with_parent
from outrider.sampling_params import Guided

if TYPE_CHECKING:
    import xgrammar

START_SECONDS = 120.0  # for the process to come up, on a machine that is busy
NICENESS = 5  # rounds come first
MAX_KEPT = 1024  # verdicts
PATIENCE = 3.0  # times as long as it may take, for a process that cannot count its own seconds
WALK_STEPS = 160  # tokens of an answer, in each of three ways
WALK_SECONDS = 0.5  # for each of them
_ARENA_MAX = -8  # of mallopt(3)


@dataclass(frozen=True)
class TrialLimits:
    seconds: float = 10.0  # of computing, for one grammar
    wait_seconds: float = 30.0  # for others' grammars
    memory: int = 768 * 2**20  # bytes, for one grammar
    mask_seconds: float = 0.05  # for one token


class GrammarTrial:
    """One grammar after the other. The process starts with the first, and again after it had to end."""

    def __init__(self, words: Words, limits: TrialLimits | None = None) -> None:
        self._words, self._limits = words, limits or TrialLimits()
        self._lock, self._turn = threading.Lock(), threading.Lock()
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()
        self._worker: multiprocessing.process.BaseProcess | None = None
        self._connection: Connection | None = None

    def is_known(self, guided: Guided) -> bool:
        """Whether check() is done at once. A ValueError where it can be told already that it cannot be used."""
        return _is_harmless(guided) or _key(guided) in self._verdicts

    def check(self, guided: Guided) -> None:
        """A ValueError where a grammar cannot be used, OverloadError where too many others are being tried."""
        if _is_harmless(guided):
            return
        key = _key(guided)
        with self._lock:
            known, reason = key in self._verdicts, self._verdicts.get(key)
        if not known:
            reason = self._verdict(key, guided)
        if reason is not None:
            raise ValueError(reason)

    def _verdict(self, key: bytes, guided: Guided) -> str | None:
        if not self._turn.acquire(timeout=self._limits.wait_seconds):
            raise OverloadError("too many grammars are being compiled: try again later")
        try:
            if key not in self._verdicts:  # it may have been another's too
                reason = self._tried(guided)
                with self._lock:
                    self._verdicts[key] = reason
                    if len(self._verdicts) > MAX_KEPT:
                        self._verdicts.popitem(last=False)
            return self._verdicts[key]
        finally:
            self._turn.release()

    def close(self) -> None:
        with self._turn:
            self._end()

    def _tried(self, guided: Guided) -> str | None:
        """Why it cannot be used."""
        connection = self._started()
        try:
            connection.send(guided)
            if connection.poll(PATIENCE * self._limits.seconds + 1):
                answer: str | None = connection.recv()
                return answer
            reason = "takes too long to compile"
        except (EOFError, OSError):
            reason = self._why_ended()
        self._end()
        return f"guided: the {guided.kind} {reason}; make it smaller"

    def _why_ended(self) -> str:
        assert self._worker is not None
        self._worker.join(1)
        code = self._worker.exitcode
        if code == -signal.SIGTERM:  # somebody else's doing
            self._end()
            raise OverloadError("the process for grammars was ended: try again later")
        return "takes too long to compile" if code == -signal.SIGPROF else "takes too much memory to compile"

    def _started(self) -> Connection:
        if self._connection is None:
            context = multiprocessing.get_context("spawn")
            ours, theirs = context.Pipe()
            self._worker = context.Process(
                target=_main, args=(theirs, self._limits), name="outrider-grammars", daemon=True
            )
            self._worker.start()
            theirs.close()
            self._connection = ours
            try:
                ours.send(self._words)
                if not ours.poll(START_SECONDS):
                    raise EOFError
                ours.recv()
            except (EOFError, OSError):
                self._end()
                raise OverloadError("the process for grammars did not come up: try again later") from None
        return self._connection

    def _end(self) -> None:
        if self._worker is not None and self._connection is not None:
            self._worker.kill()
            self._worker.join()
            self._connection.close()
        self._worker = self._connection = None


def _is_harmless(guided: Guided) -> bool:
    """There is nothing in it that a client could make large."""
    return guided.json_object or guided.choice is not None


def _key(guided: Guided) -> bytes:
    """What is the same for the same grammar; a ValueError where it is too large."""
    said = f"{guided.kind} {guided.max_whitespace} {grammar_text(guided)}"
    return hashlib.sha256(said.encode(errors="replace")).digest()


# in the process


def _main(connection: Connection, limits: TrialLimits) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    with suppress(EOFError, OSError):
        words = connection.recv()
        compiler, walk = GrammarCompiler(words), _Walk(words, limits)
        compiler.compile(Guided(json_object=True))
        _confine(limits.memory)
        os.nice(NICENESS)
        connection.send(None)
        while True:
            guided = connection.recv()
            signal.setitimer(signal.ITIMER_PROF, limits.seconds)  # of all threads; the process ends with it
            reason = _reason(compiler, walk, guided)
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send(reason)


def _reason(compiler: GrammarCompiler, walk: _Walk, guided: Guided) -> str | None:
    try:
        walk.check(compiler.compile(guided), guided.kind)
        return None
    except RecursionError:
        return f"guided: the {guided.kind} is nested too deeply; flatten it"
    except ValueError as error:
        if "bad_alloc" in str(error):
            os._exit(1)
        return str(error)
    except MemoryError:
        os._exit(1)


def _confine(room: int) -> None:
    """Not much more memory than now."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_ARENA_MAX, 2)  # threads would each reserve address space
    with suppress(ImportError, OSError, ValueError):
        import resource

        with open("/proc/self/statm") as file:
            size = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (size + room, size + room))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


class _Walk:
    """Follows a grammar as an answer would: by the first tokens that are allowed, by the longest, by any."""

    def __init__(self, words: Words, limits: TrialLimits) -> None:
        self._limits = limits
        self._lengths = np.array([len(text) for text in words.token_bytes])
        self._ends = np.array(sorted(words.end_ids), dtype=np.int64)

    def check(self, compiled: xgrammar.CompiledGrammar, kind: str) -> None:
        chance = random.Random(0)  # the same verdict for the same grammar
        ways: list[Callable[[Any], int]] = [
            lambda ids: int(ids[0]),
            lambda ids: int(ids[self._lengths[ids].argmax()]),
            lambda ids: int(ids[chance.randrange(len(ids))]),
        ]
        for choose in ways:
            self._follow(compiled, choose, kind)

    def _follow(self, compiled: xgrammar.CompiledGrammar, choose: Callable[[Any], int], kind: str) -> None:
        xgrammar = import_xgrammar()
        matcher = xgrammar.GrammarMatcher(compiled)
        mask = xgrammar.allocate_token_bitmask(1, len(self._lengths))
        begin = time.thread_time()
        for _ in range(WALK_STEPS):
            before = time.thread_time()
            if matcher.is_terminated() or before - begin > WALK_SECONDS:
                return
            matcher.fill_next_token_bitmask(mask)
            bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")[: len(self._lengths)]
            bits[self._ends] = 0
            ids = np.flatnonzero(bits)
            if not len(ids) or not matcher.accept_token(choose(ids)):
                return
            if time.thread_time() - before > self._limits.mask_seconds:
                raise ValueError(f"guided: to follow the {kind} takes too long; make it simpler")
