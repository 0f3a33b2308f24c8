"""`outrider serve --ray` as it is shipped: two replicas on one machine, one of which is killed under load."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import httpx
import openai
import psutil
import pytest
from processes import family, have_ended, named
from running import Running, wait_for
from test_router import talk

from outrider.bench.load.server_process import _free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install '.[ray]'"),
]
SECONDS = 120.0  # that a cluster may take to start, or to start a replica again
NUM_STREAMS, NUM_WHOLE = 5, 1


class Cluster:
    def __init__(self) -> None:
        self.port = _free_port()
        options = "--ray --ray-address local --num-replicas 2 --cpus-per-replica 0.5 --threads 1 --shutdown-timeout 2"
        command = [sys.executable, "-m", "outrider", "serve", *options.split(), "--port", str(self.port)]
        self.folder = tempfile.mkdtemp(prefix="ray-")  # short: names of sockets are
        environment = {**os.environ, "RAY_TMPDIR": self.folder}
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
        self.url = f"http://127.0.0.1:{self.port}"

    def num_ready(self) -> int:
        assert self.process.poll() is None, "it has ended"
        try:
            return int(httpx.get(f"{self.url}/health", timeout=10).json()["replicas"])
        except httpx.TransportError:
            return 0

    def family(self) -> list[psutil.Process]:
        return family(self.process.pid)

    def replicas(self) -> list[psutil.Process]:
        return named(self.family(), "ServeReplica:outrider")

    def count(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics").text
        return float(re.search(rf"^outrider:router_{name}_total{{.*}} (.*)$", text, re.MULTILINE)[1])

    def story(self, number: int, begun: threading.Event | None = None) -> tuple[str, str | None, int]:
        """What a client gets: text, why it ended, tokens."""
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)
        asked: Any = {
            "model": "default",
            "messages": [{"role": "user", "content": f"Tell me story number {number} about a dog."}],
            "max_tokens": 120,
            "extra_body": {"ignore_eos": True},
        }
        asked |= {"temperature": 0.9, "seed": number, "presence_penalty": 0.5} if number % 2 else {"temperature": 0}
        if number >= NUM_STREAMS:
            answer = client.chat.completions.create(**asked)
            return answer.choices[0].message.content, answer.choices[0].finish_reason, answer.usage.completion_tokens
        text, reason, num_tokens = "", None, 0
        for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
            for choice in chunk.choices:
                text += choice.delta.content or ""
                reason = choice.finish_reason or reason
            num_tokens = chunk.usage.completion_tokens if chunk.usage is not None else num_tokens
            if begun is not None and len(text) > 40:
                begun.set()
        return text, reason, num_tokens


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    try:
        wait_for(lambda: cluster.num_ready() == 2, SECONDS)
        yield cluster
    finally:
        processes = cluster.family()
        cluster.process.send_signal(signal.SIGTERM)
        code = cluster.process.wait(60)
        shutil.rmtree(cluster.folder)
    assert code == 0
    assert have_ended(processes, 20), "nothing is left behind"


def test_a_replica_is_killed_under_load(cluster: Cluster) -> None:
    expected = [cluster.story(number) for number in range(NUM_STREAMS + NUM_WHOLE)]
    begun = [threading.Event() for _ in expected]
    with ThreadPoolExecutor(len(expected)) as pool:
        running = [pool.submit(cluster.story, number, begun[number]) for number in range(len(expected))]
        for event in begun[:NUM_STREAMS]:
            assert event.wait(60)
        victim = cluster.replicas()[0]
        children = victim.children()
        os.kill(victim.pid, signal.SIGKILL)
        assert [each.result(60) for each in running] == expected, "nobody has noticed"
    assert cluster.count("resumed") >= 1, "it was carrying streams"
    wait_for(lambda: victim.pid not in {each.pid for each in cluster.replicas()}, SECONDS)
    assert have_ended(children, 20), "its engine has ended with it"
    wait_for(lambda: len(cluster.replicas()) == 2 and cluster.num_ready() == 2, SECONDS)
    assert cluster.story(1) == expected[1]
    assert {each.nice() for each in cluster.replicas()} == {0}, "they do not wait for anything else on the machine"


def test_chats_find_their_pages_again(cluster: Cluster, shared: Running) -> None:
    """20 chats over two replicas, and over one."""
    begin = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        found = sum(sum(each) for each in pool.map(lambda number: talk(cluster.url, 100 + number), range(20)))
        alone = sum(sum(each) for each in pool.map(lambda number: talk(shared.url, 500 + number), range(20)))
    assert found >= 0.9 * alone > 0, f"{found} of {alone} tokens, after {time.monotonic() - begin:.1f} s"
