"""The address that a server will listen on, taken before the model is loaded: one that is not to be had is refused at
once, and not after minutes."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

Sockets = list[socket.socket]


@contextmanager
def taken(host: str, port: int) -> Iterator[Sockets]:
    """The sockets to listen on, closed again in the end."""
    sockets = _take(host, port)
    try:
        yield sockets
    finally:
        for each in sockets:
            each.close()


def _take(host: str, port: int) -> Sockets:
    """Bound sockets, one for each address that the host's name stands for. They do not listen yet: clients are turned
    away until there is something to answer them."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise ValueError(f"--host {host} is no address ({error.strerror}): give one of this machine's") from error
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            number = port if port or not sockets else port_of(sockets)  # port 0 is any, but the same for all
            sockets.append(_bound(family, kind, protocol, (address[0], number, *address[2:])))
    except OSError as error:
        for each in sockets:
            each.close()
        raise ValueError(_reason(host, port, error)) from error
    return sockets


def port_of(sockets: Sequence[socket.socket]) -> int:
    """The port that was taken, where any would do."""
    return int(sockets[0].getsockname()[1])


def _bound(family: int, kind: int, protocol: int, address: tuple[object, ...]) -> socket.socket:
    made = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":  # elsewhere it would let two servers share a port
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
    except BaseException:
        made.close()
        raise
    return made


def _reason(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is in use: stop what listens there, or choose another with --port"
    if error.errno == errno.EACCES:
        return f"port {port} is reserved for privileged programs: choose one above 1023 with --port"
    return f"cannot listen on {host}, port {port} ({error.strerror}): choose another --host or --port"
