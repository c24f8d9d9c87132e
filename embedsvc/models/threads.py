"""How many CPU threads one batch may use, said by the thread that runs it.

A model looks here in `forward`, so whoever makes threads need not know which backends they will
run, nor in which process. Imports nothing heavy.
"""

from __future__ import annotations

import threading


class _Setting(threading.local):
    threads = 0


_SETTING = _Setting()


def set_batch_threads(threads: int) -> None:
    """Let batches on this thread use `threads` CPU threads, 1 or more, until it ends."""
    _SETTING.threads = threads


def batch_threads() -> int:
    """Return the CPU threads of batches on this thread; 0 where nobody has said."""
    return _SETTING.threads
