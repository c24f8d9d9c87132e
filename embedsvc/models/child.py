"""One life of an isolated model's process, as its server sees it: start, batches, end, log.

The process (`worker.py`) gets no descriptor but its end of the control socket and of the channels,
a process group of its own, so that a terminal's signals do not reach it, and a pipe as stdout and
stderr. Two threads here wait for its lines and for its end. All else may be called on any thread.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from embedsvc.errors import ModelDied, ModelError
from embedsvc.models.buffers import SharedBuffer
from embedsvc.models.channel import Channel
from embedsvc.models.wire import (
    MAX_MESSAGE_BYTES,
    Failed,
    Ready,
    Spec,
    Status,
    decode_answer,
    encode,
)

log = logging.getLogger(__name__)

# A line of the log; what is longer becomes several.
MAX_LINE_BYTES = 4096
# How long the log of a process that is gone may go on.
LOG_END_S = 5.0

Reason = Literal["died", "hung", "device", "closed"]


@dataclass(slots=True, frozen=True)
class Death:
    """How a process ended.

    Attributes:
        reason: `died` by itself, `hung` and was killed, lost its `device`, or was `closed`.
        detail: in words.
    """

    reason: Reason
    detail: str


class Child:
    """A running process; `end` and `close` in this order free everything.

    Args:
        spec: what it loads.
        worker: the module it runs.
        on_death: called once, by whichever thread notices the end first, when the process is gone
            and before anybody is told of it by `ModelDied`.

    Raises:
        OSError: no process can be started.
    """

    def __init__(self, spec: Spec, worker: str, on_death: Callable[[Child], None]) -> None:
        self._spec = spec
        self._on_death = on_death
        self._lock = threading.Lock()
        self._idle: list[Channel] = []
        self.death: Death | None = None
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                self._process = _start(worker, theirs)
        except OSError:
            self._control.close()
            raise
        # Where nobody closed the model they are not waited for: they wait for the process, and that
        # one for the end of this.
        self._threads = [
            threading.Thread(target=run, name=f"{name}-{self._process.pid}", daemon=True)
            for name, run in (("model-log", self._follow_log), ("model-watch", self._watch))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def ready(self, limit_s: float) -> Ready:
        """Wait until it has loaded the model.

        Raises:
            ModelError: it cannot, it ended, or it took longer than `limit_s` seconds.
        """
        source = self._spec.folder.source
        self._control.settimeout(limit_s)
        try:
            self._control.send(encode(self._spec))
            answer = self._control.recv(MAX_MESSAGE_BYTES)
        except TimeoutError:
            raise ModelError(
                f"{source}: the model's process was not ready within {limit_s:g} s"
            ) from None
        except OSError:
            answer = b""
        if not answer:
            raise ModelError(
                f"{source}: the model's process ended before it was ready "
                f"({self.end('died').detail}); its lines in the log say why"
            )
        decoded = decode_answer(answer)
        if isinstance(decoded, Failed):
            raise ModelError(decoded.message)
        return decoded

    def run(
        self, buffer: SharedBuffer, rows: int, length: int, threads: int, limit_s: float
    ) -> Status:
        """Run one batch and wait for its end, at most `limit_s` seconds.

        Raises:
            ModelDied: the process is gone, and with it whoever wrote to the buffer.
        """
        channel = self._take()
        try:
            channel.ask(buffer, rows, length, threads, limit_s)
        except OSError:
            channel.close()
            raise self._died("died", in_flight=False) from None
        try:
            status = channel.answer()
        except TimeoutError:
            channel.close()
            detail = f"no answer to {rows} x {length} tokens within {limit_s:.1f} s"
            raise self._died("hung", detail) from None
        except (OSError, EOFError):
            channel.close()
            raise self._died("died") from None
        if status is Status.DEVICE_LOST:
            channel.close()
            raise self._died("device", "its device failed for good")
        self._give_back(channel)
        return status

    def end(self, reason: Reason, detail: str = "") -> Death:
        """End the process where it still runs, and wait until it is gone; only the first counts."""
        with self._lock:
            if self.death is None:
                with suppress(ProcessLookupError):
                    # Whatever it has started, too, which may hold its sockets and its log open.
                    os.killpg(self._process.pid, signal.SIGKILL)
                status = self._process.wait()
                self.death = Death(reason, _in_words(status) if reason == "died" else detail)
                while self._idle:
                    self._idle.pop().close()
                self._on_death(self)
            return self.death

    def close(self) -> None:
        """Free what is left of a process that has ended; nobody may wait in `ready`."""
        for thread in self._threads:
            thread.join(LOG_END_S)
        self._control.close()

    # --- channels --------------------------------------------------------------------------------

    def _take(self) -> Channel:
        """Return an idle channel, or a new one."""
        with self._lock:
            if self.death is None:
                if self._idle:
                    return self._idle.pop()
                with suppress(OSError):
                    return Channel.open(self._control)
        raise self._died("died", in_flight=False)

    def _give_back(self, channel: Channel) -> None:
        with self._lock:
            if self.death is None:
                self._idle.append(channel)
                return
        channel.close()

    def _died(self, reason: Reason, detail: str = "", *, in_flight: bool = True) -> ModelDied:
        death = self.end(reason, detail)
        return ModelDied(f"the model's process is gone: {death.detail}", in_flight=in_flight)

    # --- its own threads -------------------------------------------------------------------------

    def _watch(self) -> None:
        """Notice the end of the process, whatever it did; others take its exit status."""
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        self.end("died")

    def _follow_log(self) -> None:
        """Log what the process writes."""
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            _relay(stream, self._spec.folder.source)


def _start(worker: str, control: socket.socket) -> subprocess.Popen[bytes]:
    # The same modules as here: neither what lies in the working directory nor another installation.
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", worker, str(control.fileno())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=[control.fileno()],
        # A group and not a session: one that is stopped when its server dies is woken by the
        # kernel, so that it can end too.
        process_group=0,
        env=os.environ | {"PYTHONPATH": path},
    )


def _in_words(status: int) -> str:
    """Return an exit status as `Popen` gives it in words."""
    if status >= 0:
        return f"it exited with status {status}"
    with suppress(ValueError):
        return f"it was ended by {signal.Signals(-status).name}"
    return f"it was ended by signal {-status}"


def _relay(stream: IO[bytes], source: str) -> None:
    """Log every line under the level it begins with; a traceback's lines follow their first."""
    level = logging.WARNING
    for line in iter(lambda: stream.readline(MAX_LINE_BYTES), b""):
        text = line.decode(errors="replace").rstrip()
        first, _, rest = text.partition(" ")
        named = logging.getLevelNamesMapping().get(first)
        if named is not None:
            level, text = named, rest
        safe = "".join(c if c.isprintable() else "?" for c in text)
        log.log(level, "model=%s %s", source, safe)
