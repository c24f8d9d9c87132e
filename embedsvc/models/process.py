"""`ProcessModel`: a model in a process of its own, so that what kills it kills nothing else.

A segmentation fault, a failed assertion of CUDA, a kernel that never ends: the process is gone, and
`load` starts another. Buffers are shared memory; a batch is a few integers each way. One process a
version and device; `child.py` is one life of it, `worker.py` what runs in it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from embedsvc.errors import DeviceOutOfMemory, ModelDied, ModelError, ModelFailed
from embedsvc.models.buffers import HostBuffer, SharedBuffer
from embedsvc.models.child import Child, Running
from embedsvc.models.launch import OwnProcess
from embedsvc.models.owner import Owner, SharedProcess
from embedsvc.models.threads import batch_threads
from embedsvc.models.weights import identify_weights
from embedsvc.models.wire import Attach, Ready, Spec, Status

log = logging.getLogger(__name__)

# Until more is known: large weights from a slow disk, kernels compiled at the first batches.
FIRST_LIMIT_S = 600.0
# A process that starts again and takes this much longer than those before is taken for hung.
RELOAD_FACTOR, MIN_RELOAD_LIMIT_S = 10.0, 60.0


class ProcessModel:
    """A `Model` whose `forward` runs in a child process.

    After `ModelDied` it is down until `load` is called again; what it loads must be what it was.

    Args:
        spec: what to load.
        first_limit_s: longest time of the first load, and of a batch until `watch` says better.
        least_reload_limit_s: what a later load may take, however quick those before were.
        owner: of the process, where several workers use one.

    Attributes:
        worker: the module that processes run.
    """

    worker = "embedsvc.models.worker"

    def __init__(
        self,
        spec: Spec,
        *,
        first_limit_s: float = FIRST_LIMIT_S,
        least_reload_limit_s: float = MIN_RELOAD_LIMIT_S,
        owner: Owner | None = None,
    ) -> None:
        self.dim = 0
        self.max_length = 0
        self.pad_id = 0
        self.dtype = ""
        self.device = ""
        self.settings: Mapping[str, Any] = {}
        self.warm = False
        self.load_s = 0.0
        self._spec = spec
        self._owner = owner
        self._load_limit_s = first_limit_s
        self._least_reload_limit_s = least_reload_limit_s
        self._limit_s: Callable[[int, int], float] = lambda rows, length: first_limit_s
        self._on_death: Callable[[str], None] | None = None
        self._stamps = self._stamp()
        self._ready: Ready | None = None
        # Held while a process is loaded, so that nobody frees it meanwhile.
        self._loading = threading.Lock()
        # Guards what follows. `_serving` is the child whose death is still to be told.
        self._lock = threading.Lock()
        self._child: Child | None = None
        self._serving: Child | None = None
        self._closed = False

    def load(self) -> None:
        """Start a process and wait until it has loaded the model; again after `ModelDied`.

        Raises:
            ModelError: it cannot be loaded, or is not what it was before.
        """
        with self._loading:
            self._bury()
            self._check_unchanged()
            child = self._start()
            try:
                ready = child.ready(self._load_limit_s)
                if self._ready not in (None, ready):
                    raise ModelError(
                        f"{self._spec.folder.source}: loaded again it is {ready}, but it was "
                        f"{self._ready}; restart the server"
                    )
                self._serve(child)
            except BaseException:
                child.end("closed")
                child.close()
                raise
            self._take_over(ready)
            # What the process took, not this worker: it may have found it loaded.
            self.warm, self.load_s = child.warm, child.load_s
            limit_s = max(self._least_reload_limit_s, RELOAD_FACTOR * self.load_s)
            self._load_limit_s = min(self._load_limit_s, limit_s)
        log.info(
            "model process ready model=%s pid=%d seconds=%.1f",
            self._spec.folder.source, child.pid, self.load_s,
        )  # fmt: skip

    def watch(self, limit_s: Callable[[int, int], float], on_death: Callable[[str], None]) -> None:
        """Follow the process from now on; see `Model`."""
        with self._lock:
            self._limit_s, self._on_death = limit_s, on_death
            serving = self._serving
        if serving is not None and serving.death is not None:
            self._tell(serving)

    def allocate(self, capacity_tokens: int, max_rows: int) -> SharedBuffer:
        """Return a host buffer in memory that processes share."""
        return SharedBuffer(capacity_tokens, max_rows, self.dim, self.pad_id)

    def forward(self, buffer: HostBuffer, rows: int, length: int) -> None:
        """Let the process compute `buffer.output[:rows]`; device threads, several at once.

        Raises:
            DeviceOutOfMemory: a smaller batch may fit.
            ModelFailed: the batch failed; the process goes on.
            ModelDied: the process is gone.
        """
        assert isinstance(buffer, SharedBuffer), "buffers come from `allocate`"
        child = self._child
        if child is None:
            raise ModelDied("the model's process is gone", in_flight=False)
        limit_s = self._limit_s(rows, length)
        match child.run(buffer, rows, length, batch_threads(), limit_s):
            case Status.OUT_OF_MEMORY:
                raise DeviceOutOfMemory(f"{rows} x {length} tokens do not fit on {self.device}")
            case Status.FAILED:
                raise ModelFailed(f"{rows} x {length} tokens failed in the model's process")

    def close(self) -> None:
        """End the process, whatever it does; `forward` and `load` fail from now on."""
        with self._lock:
            self._closed = True
            child = self._child
        if child is not None:
            child.end("closed")
        with self._loading:
            if child is not None:
                child.close()

    # --- one load --------------------------------------------------------------------------------

    def _bury(self) -> None:
        """Free the former process."""
        with self._lock:
            former, self._child, self._serving = self._child, None, None
        if former is not None:
            former.end("closed")
            former.close()

    def _start(self) -> Child:
        with self._lock:
            if self._closed:
                raise ModelError(f"{self._spec.folder.source}: closed while it was loaded")
            try:
                self._child = Child(self._running(), self._tell)
            except OSError as error:
                raise ModelError(f"no process can be started for the model: {error}") from error
            return self._child

    def _running(self) -> Running:
        if self._owner is None:
            return OwnProcess(self._spec, self.worker)
        return SharedProcess(self._owner, Attach(self.worker, self._spec))

    def _serve(self, child: Child) -> None:
        """Let its death be told from now on."""
        with self._lock:
            if (death := child.death) is not None:
                what = f"{self._spec.folder.source}: ended at once: {death.detail}"
                raise ModelError(what, killed=death.killed)
            self._serving = child

    def _take_over(self, ready: Ready) -> None:
        self._ready = ready
        self.dim, self.max_length, self.pad_id = ready.dim, ready.max_length, ready.pad_id
        self.dtype, self.device, self.settings = ready.dtype, ready.device, ready.settings

    def _tell(self, child: Child) -> None:
        """Tell the death of a process that served, once; any thread."""
        with self._lock:
            if child is not self._serving or self._on_death is None or self._closed:
                return
            self._serving = None
            on_death = self._on_death
        assert child.death is not None
        log.error(
            "model process is gone model=%s pid=%d reason=%s: %s",
            self._spec.folder.source, child.pid, child.death.reason, child.death.detail,
        )  # fmt: skip
        on_death(child.death.reason)

    def _stamp(self) -> list[tuple[int, int, int]]:
        found = [file.stat() for file in self._spec.folder.weights]
        return [(stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in found]

    def _check_unchanged(self) -> None:
        """See that the weights are those that were verified, reading them only where they changed.

        Raises:
            ModelError: they are others.
        """
        folder = self._spec.folder
        try:
            stamps = self._stamp()
            if stamps != self._stamps and identify_weights(folder.weights) != folder.weights_id:
                raise ModelError(
                    f"{folder.source}: the weights have changed since they were verified; restart "
                    "the server to serve the new ones"
                )
        except OSError as error:
            raise ModelError(f"{folder.source}: cannot be read any more: {error}") from error
        self._stamps = stamps
