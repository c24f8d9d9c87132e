"""The process of an isolated model whose texts can do to it what real ones do to real ones.

`python -m tests.poisoned_worker FD` is `embedsvc.models.worker` with a `HashModel` that looks at
the first id of every row. Its cache directory holds files that change how it is loaded.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from embedsvc.errors import DeviceLost, DeviceOutOfMemory, ModelError
from embedsvc.models import worker
from embedsvc.models.buffers import HostBuffer
from embedsvc.models.hashing import HashModel
from embedsvc.models.wire import Spec

MODULE = "tests.poisoned_worker"
# First ids, outside of any vocabulary.
KILL, EXIT, SEGFAULT, FREEZE, LOSE_DEVICE, RAISE, NOISE, HOLD, LEAVE = range(900_001, 900_010)
# More rows than this do not fit.
FITS = 4
DIM = 4
# A process that finds this file says that the weights are corrupt.
CORRUPT = "corrupt"
# A process that finds this named pipe is not ready before somebody writes to it; one in a batch
# with `HOLD` writes to it and stays there.
SLOW, HELD = "slow", "held"


class PoisonedModel(HashModel):
    """Does what the first ids of the rows say."""

    def __init__(self, spec: Spec) -> None:
        super().__init__(dim=DIM, max_length=64)
        self._folder = spec.cache_dir
        self._deeds: dict[int, Callable[[], None]] = {
            KILL: lambda: os.kill(os.getpid(), signal.SIGKILL),
            EXIT: lambda: os._exit(3),
            SEGFAULT: self._read_nothing,
            FREEZE: self._freeze,
            LOSE_DEVICE: self._lose_device,
            RAISE: self._fail,
            NOISE: self._write,
            HOLD: self._hold,
            LEAVE: self._leave,
        }

    def load(self) -> None:
        """Wait, fail or be ready, as the files say."""
        if (self._folder / CORRUPT).exists():
            raise ModelError("the weights are corrupt")
        if (self._folder / SLOW).exists():
            (self._folder / SLOW).read_text()

    def forward(self, buffer: HostBuffer, rows: int, length: int) -> None:
        """Do the deeds, then compute."""
        if rows > FITS:
            raise DeviceOutOfMemory("no room")
        for first in buffer.grid(rows, length)[:, 0].tolist():
            self._deeds.get(first, lambda: None)()
        super().forward(buffer, rows, length)

    def _read_nothing(self) -> None:
        ctypes.string_at(0)

    def _write(self) -> None:
        sys.stderr.write("noise \x1b[31m\n")

    def _freeze(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)
        # The signal may take a moment to reach this thread.
        threading.Event().wait()

    def _leave(self) -> None:
        """Die, and leave a process behind that has all descriptors."""
        if os.fork() == 0:
            threading.Event().wait()
        os.kill(os.getpid(), signal.SIGKILL)

    def _lose_device(self) -> None:
        raise DeviceLost("assertion failed")

    def _fail(self) -> None:
        raise RuntimeError("broken on purpose")

    def _hold(self) -> None:
        """Stay for ever, the first time."""
        pipe = Path(self._folder, HELD)
        if pipe.exists():
            # Gone before anybody knows of it: who is told may end this process at once.
            with pipe.open("w") as told:
                pipe.unlink()
                told.write("held")
            threading.Event().wait()


def load(spec: Spec) -> PoisonedModel:
    """Return the loaded model."""
    model = PoisonedModel(spec)
    model.load()
    return model


if __name__ == "__main__":
    worker.main(load)
