"""`embedsvc serve`, but the weightless model is the one that texts can break.

So it is in every process: of the workers, and of isolated models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from embedsvc import cli
from embedsvc.config import Config
from embedsvc.models import hashing
from embedsvc.models.process import ProcessModel
from embedsvc.supervisor import supervisor
from loadtest.chaos import worker
from loadtest.chaos.faulty import FaultyModel

MODULE = "loadtest.chaos.server"
_supervise = supervisor.supervise


def supervise(
    config: Config,
    command: Sequence[str],
    reread: Callable[[], Config],
    on_ready: Callable[[str, dict[str, Any]], None],
    silent_s: float = supervisor.SILENT_S,
) -> None:
    """Supervise workers that run this module."""
    words = list(command)
    words[words.index("-m") + 1] = MODULE
    _supervise(config, words, reread, on_ready, silent_s)


def main() -> None:
    """Serve, or be a worker of the supervisor."""
    hashing.HashModel = FaultyModel  # type: ignore[misc, assignment]
    ProcessModel.worker = worker.MODULE
    supervisor.supervise = supervise
    cli.main()


if __name__ == "__main__":
    main()
