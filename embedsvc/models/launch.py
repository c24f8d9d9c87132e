"""An isolated model's process that this one starts and owns: its start, its log, its end.

The process (`worker.py`) gets no descriptor but its end of the control socket and of the channels,
a process group of its own, so that a terminal's signals do not reach it, and a pipe as stdout and
stderr, which one thread here reads. Any thread.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import IO, Literal

from embedsvc.errors import ModelError
from embedsvc.models.wire import MAX_MESSAGE_BYTES, Failed, Ready, Spec, decode_answer, encode

log = logging.getLogger(__name__)

# A line of the log; what is longer becomes several.
MAX_LINE_BYTES = 4096
# How long the log of a process that is gone may go on.
LOG_END_S = 5.0

Reason = Literal["died", "hung", "device", "closed"]
# How a process ended that was killed, in words.
KILLED = "it was ended by SIGKILL"


class OwnProcess:
    """A model's process; `end` and `close` in this order free everything.

    Args:
        spec: what it loads.
        worker: the module it runs.

    Attributes:
        control: this end of the control socket.
        warm: nobody has run a batch on it before.
        load_s: seconds it took until it was ready; 0 before.

    Raises:
        OSError: no process can be started.
    """

    warm = False

    def __init__(self, spec: Spec, worker: str) -> None:
        self.load_s = 0.0
        self._spec = spec
        self._began = monotonic()
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                self._process = _start(worker, theirs)
        except OSError:
            self.control.close()
            raise
        # Where nobody closed the model it is not waited for: it waits for the process, and that one
        # for the end of this.
        name = f"model-log-{self.pid}"
        self._log_thread = threading.Thread(target=self._follow_log, name=name, daemon=True)
        self._log_thread.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def ready(self, limit_s: float | None) -> Ready:
        """Wait until it has loaded the model; see `Running`. None waits without limit.

        Raises:
            ModelError: it cannot, it ended, or it took longer than `limit_s` seconds.
        """
        source = self._spec.folder.source
        self.control.settimeout(limit_s)
        try:
            self.control.send(encode(self._spec))
            answer = self.control.recv(MAX_MESSAGE_BYTES)
        except TimeoutError:
            raise ModelError(
                f"{source}: the model's process was not ready within {limit_s:g} s"
            ) from None
        except OSError:
            answer = b""
        finally:
            self.control.settimeout(None)
        if not answer:
            how = self.end("died")
            raise ModelError(
                f"{source}: the model's process ended before it was ready ({how}); its lines in "
                "the log say why",
                killed=how == KILLED,
            )
        decoded = decode_answer(answer)
        if isinstance(decoded, Failed):
            raise ModelError(decoded.message)
        self.load_s = monotonic() - self._began
        return decoded

    def kill(self) -> None:
        """End it where it still runs."""
        with suppress(ProcessLookupError):
            # Whatever it has started, too, which may hold its sockets and its log open.
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self, _: Reason) -> str:
        """End it where it still runs, wait until it is gone, and say in words how it ended."""
        self.kill()
        return _in_words(self._process.wait())

    def follow(self) -> None:
        """Return when it is gone, whatever it did; others take its exit status."""
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)

    def close(self) -> None:
        """Free what is left of it."""
        self._log_thread.join(LOG_END_S)
        self.control.close()

    def _follow_log(self) -> None:
        """Log what the process writes."""
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            _relay(stream, self._spec.folder.source)


def _start(worker: str, control: socket.socket) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", worker, str(control.fileno())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=[control.fileno()],
        # A group and not a session: one that is stopped when its server dies is woken by the
        # kernel, so that it can end too.
        process_group=0,
        env=same_modules(),
    )


def same_modules() -> dict[str, str]:
    """Return the environment in which `python -P` finds the same modules as this process.

    Neither what lies in the working directory nor another installation.
    """
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    return os.environ | {"PYTHONPATH": path}


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
