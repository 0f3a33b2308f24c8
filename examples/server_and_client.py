"""`outrider serve` in a process of its own, and OpenAI's client. Needs: pip install '.[serve]' openai

python examples/server_and_client.py [MODEL]
"""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from openai import APIConnectionError, InternalServerError, OpenAI


@contextmanager
def server(*arguments: str) -> Iterator[OpenAI]:
    """A client of a server that is ready; the server ends with it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-m", "outrider", "serve", "--port", str(port), *arguments])
    try:
        with OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
            while not is_ready(client):
                if process.poll() is not None:
                    raise SystemExit(f"the server ended with status {process.returncode}")
                time.sleep(0.2)
            yield client
    finally:
        process.terminate()
        process.wait()


def is_ready(client: OpenAI) -> bool:
    try:
        return bool(client.models.list().data)
    except (APIConnectionError, InternalServerError):
        return False


def main() -> None:
    with server(*sys.argv[1:2]) as client:
        (model, *_) = client.models.list().data
        chunks = client.chat.completions.create(
            model=model.id,
            messages=[{"role": "user", "content": "Tell me about the moon."}],
            max_tokens=48,
            temperature=0,
            stream=True,
        )
        for chunk in chunks:
            print(chunk.choices[0].delta.content or "" if chunk.choices else "", end="", flush=True)
        print()


if __name__ == "__main__":
    main()
