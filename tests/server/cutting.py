"""A proxy that cuts connections: what a client sees of a server that is killed, at any byte."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque


class Cutting:
    """In front of one server. `cuts`: for each generation to come, after how many bytes of its answer both ends are
    closed; several proxies may share them. Nothing else is cut."""

    def __init__(self, port: int, cuts: deque[int]) -> None:
        self._port, self._cuts = port, cuts
        self.num_cut = self.num_asked = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        server = socket.create_connection(("127.0.0.1", self._port))
        left: list[int | None] = [None]

        def forward() -> None:
            try:
                while data := client.recv(2**16):
                    if data.startswith(b"POST /v1/"):
                        self.num_asked += 1
                        left[0] = self._cuts.popleft() if self._cuts else None
                    server.sendall(data)
            except OSError:
                pass
            finally:
                with contextlib.suppress(OSError):
                    server.shutdown(socket.SHUT_RDWR)

        threading.Thread(target=forward, daemon=True).start()
        try:
            while data := server.recv(2**16):
                if left[0] is not None and len(data) >= left[0]:
                    client.sendall(data[: left[0]])
                    self.num_cut += 1
                    break
                left[0] = left[0] if left[0] is None else left[0] - len(data)
                client.sendall(data)
        except OSError:
            pass
        finally:
            for each in (client, server):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)  # whoever reads from it in another thread is told
                each.close()
