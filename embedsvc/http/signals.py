"""Signals that end the process: the first one in good order, the second one at once."""

from __future__ import annotations

import os
import signal
from types import FrameType

END_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def next_one_kills() -> None:
    """Give up handling them: even a loop that hangs is ended by the next one.

    The kernel keeps the default action from the first process of a container.
    """
    for number in END_SIGNALS:
        signal.signal(number, _exit_killed if os.getpid() == 1 else signal.SIG_DFL)


def _exit_killed(number: int, _: FrameType | None) -> None:
    """End at once, with the exit status that a shell shows for this signal."""
    os._exit(128 + number)
