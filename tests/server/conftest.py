"""The real server, with the embedded pair behind it in a thread. Of several servers only one has work at a time."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace

import environment  # noqa: F401
import openai
import pytest
from running import Running, Serve, wait_for

from outrider import LLM
from outrider.pair import AUTO, named_pair
from outrider.server.app import Application
from outrider.server.defaults import ServerDefaults
from outrider.server.engine_client import EngineClient, QueueLimits
from outrider.server.engine_host import ThreadHost
from outrider.server.parsers import ParserNames
from outrider.server.security import Access, access_for
from outrider.server.serving import Server
from outrider.training.online import OnlineLearner


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    """Drafts as much as it can, so that what is drafted is known; test_shipped.py has what users have."""
    target, speculative = named_pair(None, AUTO)
    assert speculative is not None
    with LLM(target, replace(speculative, adaptive=False), max_num_seqs=4) as llm:
        yield llm


@pytest.fixture(scope="session")
def serve(llm: LLM) -> Serve:
    @contextlib.contextmanager
    def running(
        limits: QueueLimits | None = None,
        access: Access | None = None,
        drain: float = 5.0,
        parsers: ParserNames | None = None,
        other: LLM | None = None,
        exit_on_death: bool = True,
        defaults: ServerDefaults | None = None,
        learner: OnlineLearner | None = None,
    ) -> Iterator[Running]:
        access = access or access_for("127.0.0.1")
        behind = other or llm
        host = ThreadHost(behind, "default", learner)
        engine = EngineClient(host.link, host.model, "default", limits or QueueLimits(), host.why_ended)
        application = Application(engine, behind.tokenizer, "default", access, parsers, defaults=defaults)
        server = Server(application, "127.0.0.1", 0, drain, exit_on_death=exit_on_death)
        thread = threading.Thread(target=server.run)
        thread.start()
        wait_for(lambda: server.started)
        try:
            yield Running(behind, application, server, thread, server.servers[0].sockets[0].getsockname()[1])
        finally:
            server.handle_exit(15, None)
            server.handle_exit(15, None)
            thread.join(20)
            assert not thread.is_alive()
            host.close()

    return running


@pytest.fixture(scope="session")
def shared(serve: Serve) -> Iterator[Running]:
    """For tests that leave it as they found it."""
    with serve() as running:
        yield running


@pytest.fixture
def running(shared: Running) -> Iterator[Running]:
    yield shared
    shared.wait_until_idle()


@pytest.fixture
def client(running: Running) -> openai.OpenAI:
    return running.openai()
