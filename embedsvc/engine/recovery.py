"""What an engine does about a model that died: load it again, then try again what it left undone.

The scheduler thread owns it and waits in it; other threads read and interrupt. Knows no queue: what
waits there goes on waiting meanwhile. Slots of the device are free meanwhile, for other models.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf

from embedsvc.engine.sequence import Batch
from embedsvc.errors import EmbedsvcError
from embedsvc.metrics import VersionMetrics
from embedsvc.models import Model

log = logging.getLogger(__name__)

# A model was healthy when it lived this long, or ran so many batches.
HEALTHY_S, HEALTHY_BATCHES = 60.0, 20
# Nobody is told to come back sooner.
MIN_LEFT_S = 0.5


@dataclass(slots=True, frozen=True)
class Patience:
    """How long an engine waits for a model that may die.

    Attributes:
        hang_limit_s: a batch that takes longer than this and than `hang_factor` times its
            prediction is taken for hung.
        hang_factor: see there.
        first_pause_s: before the second load in a row; none comes before the first, unless the
            model was not healthy.
        max_pause_s: the pauses double up to this.
    """

    hang_limit_s: float = 10.0
    hang_factor: float = 20.0
    first_pause_s: float = 0.5
    max_pause_s: float = 30.0

    def pauses(self) -> Iterator[float]:
        """Yield the seconds to wait before each load in a row."""
        yield 0.0
        pause_s = self.first_pause_s
        while True:
            yield pause_s
            pause_s = min(self.max_pause_s, 2 * pause_s)

    def batch_limit_s(self, predicted_s: float) -> float:
        """Return the seconds after which a batch is taken for hung."""
        return max(self.hang_limit_s, self.hang_factor * predicted_s)


PATIENCE = Patience()


class Recovery:
    """One model's deaths.

    Args:
        name: of the model, for the log.
        model: loaded.
        patience: with it.
        metrics: counts the loads.
        clock: monotonic seconds.
        wait: waits some seconds or until `interrupt`; says whether it was that.

    Attributes:
        down: whether the model is dead and not loaded again yet.
    """

    def __init__(
        self,
        name: str,
        model: Model,
        patience: Patience,
        metrics: VersionMetrics,
        clock: Callable[[], float],
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        self.down = False
        self._name = name
        self._model = model
        self._patience = patience
        self._metrics = metrics
        self._clock = clock
        self._interrupted = threading.Event()
        self._wait = wait or self._interrupted.wait
        self._loaded_at = clock()
        self._due = 0.0
        self._loads_in_vain = 0
        self._pauses = patience.pauses()
        # When the latest batches ended well; device threads append, one operation each.
        self._good: deque[float] = deque(maxlen=HEALTHY_BATCHES)
        self._undone: deque[Batch] = deque()

    # --- any thread ------------------------------------------------------------------------------

    def left_s(self) -> float:
        """Return the seconds until the model is expected to answer: 0 where it does.

        `inf` where it could not be loaded the last time.
        """
        if not self.down:
            return 0.0
        return inf if self._loads_in_vain else self._due_s()

    def retry_after_s(self) -> float:
        """Return when it is worth to ask again."""
        return self._due_s()

    def interrupt(self) -> None:
        """Let `revive` give up, as soon as the load it may be in ends."""
        self._interrupted.set()

    def worked(self) -> None:
        """Note a batch that ended well."""
        self._good.append(self._clock())

    # --- scheduler thread ------------------------------------------------------------------------

    def died(self, reason: str) -> None:
        """Take note of a death."""
        self.down, self._reason = True, reason
        if self._was_healthy():
            self._pauses = self._patience.pauses()

    def revive(self) -> bool:
        """Load the model, where it is dead, as often as it takes; False means stop."""
        while self.down:
            pause_s = next(self._pauses)
            self._due = self._clock() + pause_s + self._model.load_s
            if self._wait(pause_s):
                return False
            self._load()
        return not self._interrupted.is_set()

    def undone(self, batch: Batch) -> None:
        """Keep rows that a dead model left, to be tried again."""
        self._undone.append(batch)

    @property
    def n_undone(self) -> int:
        """Batches to be tried again."""
        return len(self._undone)

    def next(self) -> Batch | None:
        """Return what is to be tried again now; None where nothing is."""
        return self._undone.popleft() if self._undone else None

    def _load(self) -> None:
        try:
            self._model.load()
        except Exception as error:  # the next load may succeed; the service stays
            if not self._interrupted.is_set():
                self._loads_in_vain += 1
                known = isinstance(error, EmbedsvcError)
                log.error(
                    "model not loaded again model=%s times=%d: %s",
                    self._name, self._loads_in_vain, error, exc_info=None if known else error,
                )  # fmt: skip
            return
        self._loaded_at = self._clock()
        self._good.clear()
        self._loads_in_vain = 0
        self.down = False
        self._metrics.restarts[self._reason].inc()

    def _was_healthy(self) -> bool:
        lived_s = self._clock() - self._loaded_at
        return lived_s >= HEALTHY_S or len(self._good) == HEALTHY_BATCHES

    def _due_s(self) -> float:
        return max(MIN_LEFT_S, self._due - self._clock())
