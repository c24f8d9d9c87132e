"""The process of an isolated model: `python -m embedsvc.models.worker FD`, started by `child.py`.

FD is its end of the control socket (see `wire.py`). The main thread loads the model and then gives
every channel a thread; one more thread waits for the end of the control socket and ends the process
with it, even in the middle of a batch, so that a model never outlives its server. What it writes to
stderr is logged by the server. Knows token ids and no requests.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

from embedsvc.errors import DeviceLost, DeviceOutOfMemory, EmbedsvcError
from embedsvc.models import Model, load_in_process
from embedsvc.models.buffers import HostBuffer, SharedBuffer
from embedsvc.models.threads import set_batch_threads
from embedsvc.models.wire import (
    MAX_FAILURE_CHARACTERS,
    MAX_MESSAGE_BYTES,
    REPLY,
    REQUEST,
    Failed,
    Op,
    Ready,
    Spec,
    Status,
    decode_spec,
    encode,
)

log = logging.getLogger(__name__)

# Whoever stops a server decides about this process too.
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# How long a process whose device is lost waits for its end.
TOLD_S = 5.0
# Where memory runs out the kernel takes this process and leaves the server, which starts another.
OOM_SCORE_ABOVE, MAX_OOM_SCORE = 300, 1000
_OOM_SCORE = Path("/proc/self/oom_score_adj")

Load = Callable[[Spec], Model]


def load(spec: Spec) -> Model:
    """Return the loaded model.

    Raises:
        ModelError: it cannot be loaded or its vectors cannot be trusted.
    """
    return load_in_process(spec.version, spec.folder, spec.cache_dir)


def main(load: Load = load) -> None:
    """Serve one model until the server is gone."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    _be_first_to_go()
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    serve(control, load)


def serve(control: socket.socket, load: Load) -> None:
    """Load what the control socket says and run batches; returns where that cannot be loaded."""
    message = control.recv(MAX_MESSAGE_BYTES)
    if not message:
        return
    spec = decode_spec(message)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")
    logging.getLogger("embedsvc").setLevel(spec.log_level)
    channels: SimpleQueue[socket.socket] = SimpleQueue()
    threading.Thread(target=_follow_server, args=(control, channels), daemon=True).start()
    try:
        model = load(spec)
    except EmbedsvcError as error:
        control.send(encode(Failed(str(error)[:MAX_FAILURE_CHARACTERS])))
        return
    except Exception as error:  # the server's load fails with it, whatever it is
        log.exception("model not loaded")
        control.send(encode(Failed(f"{spec.folder.source}: {type(error).__name__}: {error}")))
        return
    control.send(encode(_ready(model)))
    while True:
        threading.Thread(target=_serve_channel, args=(model, channels.get()), daemon=True).start()


def _ready(model: Model) -> Ready:
    return Ready(
        dim=model.dim,
        max_length=model.max_length,
        pad_id=model.pad_id,
        dtype=model.dtype,
        device=model.device,
        settings=dict(model.settings),
    )


def _be_first_to_go() -> None:
    with contextlib.suppress(OSError):
        score = int(_OOM_SCORE.read_text()) + OOM_SCORE_ABOVE
        _OOM_SCORE.write_text(str(min(score, MAX_OOM_SCORE)))


def _follow_server(control: socket.socket, channels: SimpleQueue[socket.socket]) -> None:
    """Take in channels until the server closes the control socket or dies."""
    while True:
        try:
            message, fds, _, _ = socket.recv_fds(control, 1, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError:
            os._exit(0)
        if not message:
            os._exit(0)
        for fd in fds:
            channels.put(socket.socket(fileno=fd))


def _serve_channel(model: Model, channel: socket.socket) -> None:
    """Run the batches of one channel until its other end is closed."""
    buffers: dict[int, HostBuffer] = {}
    try:
        while _answer(model, channel, buffers):
            pass
    except ConnectionError:
        log.debug("a channel ended in a batch")
    except BaseException:  # the server must not wait for an answer that never comes
        log.exception("channel failed")
        os._exit(1)


def _answer(model: Model, channel: socket.socket, buffers: dict[int, HostBuffer]) -> bool:
    """Do what the next request says; False where there is none."""
    message, fds, _, _ = socket.recv_fds(channel, REQUEST.size, 1, socket.MSG_CMSG_CLOEXEC)
    if not message:
        return False
    op, number, a, b, threads = REQUEST.unpack(message)
    if op == Op.ADD:
        buffers[number] = SharedBuffer(a, b, model.dim, model.pad_id, fds[0])
    elif op == Op.DROP:
        del buffers[number]
    else:
        status = _run(model, buffers[number], a, b, threads)
        channel.send(REPLY.pack(status))
        if status == Status.DEVICE_LOST:
            # Whoever is told ends this process, for this reason; it may be gone itself.
            time.sleep(TOLD_S)
            os._exit(1)
    return True


def _run(model: Model, buffer: HostBuffer, rows: int, length: int, threads: int) -> Status:
    if threads:
        set_batch_threads(threads)
    try:
        model.forward(buffer, rows, length)
    except DeviceOutOfMemory as error:
        log.info("out of memory rows=%d length=%d: %s", rows, length, error)
        return Status.OUT_OF_MEMORY
    except DeviceLost:
        log.exception("device lost rows=%d length=%d", rows, length)
        return Status.DEVICE_LOST
    except Exception:  # the server splits the batch, whatever it is
        log.exception("forward failed rows=%d length=%d", rows, length)
        return Status.FAILED
    return Status.OK


if __name__ == "__main__":
    main()
