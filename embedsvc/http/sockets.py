"""Sockets and file descriptors, as the operating system sees them."""

from __future__ import annotations

import asyncio
import logging
import resource
import select
import socket
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from embedsvc.config import ServerConfig
from embedsvc.errors import StartError

log = logging.getLogger(__name__)

# Bursts of new connections wait here; the kernel cuts it to net.core.somaxconn.
BACKLOG = 4096
SOMAXCONN = Path("/proc/sys/net/core/somaxconn")
# Ten thousand idle connections, and as many for everything else.
ENOUGH_FILES = 20_000


def listen(config: ServerConfig, *, reuse_port: bool = False) -> socket.socket:
    """Take the address before anything is loaded.

    Args:
        config: names it.
        reuse_port: take it beside others who do the same.

    Raises:
        StartError: it is in use, not ours, or not an address.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(
            address[:2], family=family, backlog=BACKLOG, reuse_port=reuse_port
        )
    except OSError as error:
        raise StartError(
            f"server.host, server.port: cannot listen on {config.host}:{config.port}: "
            f"{error.strerror}. Choose another port, or stop what uses it."
        ) from error


def listen_together(config: ServerConfig, n_sockets: int) -> list[socket.socket]:
    """Take the address with several sockets; the kernel spreads new connections over them.

    By a hash of both addresses, so evenly only on average. One socket for all processes would give
    nearly every connection to the process that wakes first (measured: 15 of 16).

    Raises:
        StartError: it is in use, not ours, or not an address.
    """
    # Alone first: others of this user who share the address would take part of the connections.
    with listen(config) as alone:
        config = replace(config, port=alone.getsockname()[1])
    return [listen(config, reuse_port=True) for _ in range(n_sockets)]


def url_of(listener: socket.socket) -> str:
    """Return the address of a listening socket as a URL."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def address_of(name: Any) -> tuple[str, int] | None:
    """Return host and port of a socket's name; None for a socket that has none."""
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) else None


def allow_many_connections() -> None:
    """Raise the limit of open files as far as allowed; log what stays small."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < ENOUGH_FILES:
        log.warning("few connections possible RLIMIT_NOFILE=%d wanted=%d", hard, ENOUGH_FILES)
    somaxconn = int(SOMAXCONN.read_text()) if SOMAXCONN.exists() else BACKLOG
    if somaxconn < BACKLOG:
        log.warning("bursts may be refused net.core.somaxconn=%d wanted=%d", somaxconn, BACKLOG)


def accept_waiting(listener: socket.socket) -> list[socket.socket]:
    """Take the connections that the kernel has accepted; closing the listener would reset them."""
    accepted = []
    listener.setblocking(False)
    try:
        while True:
            accepted.append(listener.accept()[0])
    except OSError:
        return accepted


def readable(transport: asyncio.BaseTransport) -> bool:
    """Say whether something has arrived that the event loop has not seen yet."""
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
    return bool(poll.poll(0))
