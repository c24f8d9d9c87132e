"""The metrics of all workers, for whoever asks one of them. On the supervisor's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from embedsvc.metrics import Metrics
from embedsvc.supervisor.child import Child
from embedsvc.supervisor.messages import AllMetrics
from embedsvc.totals import COUNTED, Family, Totals, families_of

# A worker that has not told its numbers by then is shown with those it told before.
METRICS_S = 1.0


class Scrapes:
    """Collects the numbers of all, once for everybody who wants them at the same time.

    Args:
        own: metrics of the supervisor itself.
        children: everyone whose process runs; changes.
    """

    def __init__(self, own: Metrics, children: Collection[Child]) -> None:
        self._own = own
        self._children = children
        self._totals = Totals()
        # Those who want the numbers of all, once for each time that they asked.
        self._asking: list[Child] = []
        self._answering: asyncio.Task[None] | None = None

    def hear(self, child: Child, families: list[Family] | None) -> None:
        """Take note of a worker's numbers, or of its wish for those of all."""
        if families is not None:
            self._totals.tell(child, families)
            return
        self._asking.append(child)
        if self._answering is None or self._answering.done():
            self._answering = asyncio.create_task(self._answer())

    def forget(self, child: Child) -> None:
        """Keep of a worker that is gone what it had counted."""
        self._totals.forget(child)

    def alone(self) -> bytes:
        """Return what is known where no worker can be asked."""
        self._totals.tell(self, families_of(self._own.registry))
        return self._totals.render()

    async def _answer(self) -> None:
        while self._asking:
            asking, self._asking = self._asking, []
            those = [child for child in self._children if child.ready or child in asking]
            if telling := [asyncio.ensure_future(child.numbers_told()) for child in those]:
                await asyncio.wait(telling, timeout=METRICS_S)
            # Workers know the rest.
            own = [f for f in families_of(self._own.registry) if f.kind in COUNTED]
            self._totals.tell(self, own)
            answer = AllMetrics(self._totals.render())
            for child in asking:
                child.tell(answer)
