"""One life of an isolated model's process, as its server sees it: start, batches, end, log.

The process (`worker.py`) gets no descriptor but its end of the control socket and of the channels,
a process group of its own, so that a terminal's signals do not reach it, and a pipe as stdout and
stderr, which one thread here reads until the process is gone. Any thread.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from embedsvc.errors import ModelDied, ModelError
from embedsvc.models.buffers import SharedBuffer
from embedsvc.models.wire import (
    MAX_MESSAGE_BYTES,
    REPLY,
    REQUEST,
    Failed,
    Op,
    Ready,
    Spec,
    Status,
    decode_answer,
    encode,
)

log = logging.getLogger(__name__)

# A line of the log; what is longer becomes several.
MAX_LINE_BYTES = 4096

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
        self._idle: list[_Channel] = []
        self.death: Death | None = None
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                self._process = _start(worker, theirs)
        except OSError:
            self._control.close()
            raise
        name = f"model-log-{self._process.pid}"
        # Where nobody closed the model it is not waited for: it waits for the process, and that one
        # for the end of this.
        self._log_thread = threading.Thread(target=self._follow_log, name=name, daemon=True)
        self._log_thread.start()

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
                self._process.kill()
                status = self._process.wait()
                self.death = Death(reason, _in_words(status) if reason == "died" else detail)
                while self._idle:
                    self._idle.pop().close()
                self._on_death(self)
            return self.death

    def close(self) -> None:
        """Free what is left of a process that has ended; nobody may wait in `ready`."""
        self._log_thread.join()
        self._control.close()

    # --- channels --------------------------------------------------------------------------------

    def _take(self) -> _Channel:
        """Return an idle channel, or a new one."""
        with self._lock:
            if self.death is None:
                if self._idle:
                    return self._idle.pop()
                with suppress(OSError):
                    return _Channel.open(self._control)
        raise self._died("died", in_flight=False)

    def _give_back(self, channel: _Channel) -> None:
        with self._lock:
            if self.death is None:
                self._idle.append(channel)
                return
        channel.close()

    def _died(self, reason: Reason, detail: str = "", *, in_flight: bool = True) -> ModelDied:
        death = self.end(reason, detail)
        return ModelDied(f"the model's process is gone: {death.detail}", in_flight=in_flight)

    # --- the log thread --------------------------------------------------------------------------

    def _follow_log(self) -> None:
        """Log what the process writes until it is gone; so its end is noticed when it is idle."""
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            _relay(stream, self._spec.folder.source)
        self.end("died")


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


class _Channel:
    """One end of a channel: one batch at a time, by one thread at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._known: dict[int, weakref.ref[SharedBuffer]] = {}

    @classmethod
    def open(cls, control: socket.socket) -> _Channel:
        """Make a channel and send its other end.

        Raises:
            OSError: the process is gone.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                socket.send_fds(control, [b"c"], [theirs.fileno()])
            except OSError:
                ours.close()
                raise
        return cls(ours)

    def ask(
        self, buffer: SharedBuffer, rows: int, length: int, threads: int, limit_s: float
    ) -> None:
        """Send a batch; `answer` waits `limit_s` seconds for it.

        Raises:
            OSError: the process is gone.
        """
        self._socket.settimeout(limit_s)
        if buffer.number not in self._known:
            self._introduce(buffer)
        self._socket.send(REQUEST.pack(Op.RUN, buffer.number, rows, length, threads))

    def answer(self) -> Status:
        """Return how the batch ended.

        Raises:
            OSError: the process is gone; TimeoutError: it has not answered.
            EOFError: the process is gone.
        """
        message = self._socket.recv(REPLY.size)
        if not message:
            raise EOFError
        (status,) = REPLY.unpack(message)
        return Status(status)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def _introduce(self, buffer: SharedBuffer) -> None:
        """Make a buffer known, and those forgotten that are no more."""
        for number in [number for number, known in self._known.items() if known() is None]:
            del self._known[number]
            self._socket.send(REQUEST.pack(Op.DROP, number, 0, 0, 0))
        max_rows, capacity_tokens = len(buffer.lengths), len(buffer.ids)
        message = REQUEST.pack(Op.ADD, buffer.number, capacity_tokens, max_rows, 0)
        socket.send_fds(self._socket, [message], [buffer.fd])
        self._known[buffer.number] = weakref.ref(buffer)
