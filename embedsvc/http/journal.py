"""What is kept of requests that are over: counts by route, and a line for the slow and the failed.

Knows nothing of ASGI. Runs on the event loop.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from embedsvc.calls import EmbedCall, Embedded
from embedsvc.errors import ClientGone, InternalError, NotReady, RequestError
from embedsvc.metrics import Metrics

log = logging.getLogger(__name__)

# Every path of the route for vectors, and what it is called in metrics.
PATHS = ("/v1/embeddings", "/embeddings")
ROUTE = PATHS[0]
# What is counted where no route took the request.
NO_ROUTE = "none"


@dataclass(slots=True)
class Entry:
    """What is known of a request for vectors when it is over.

    Attributes:
        request_id: as the client was told.
        status: HTTP status of the answer; 499 where nobody was there to get one.
        reason: why, as in metrics.
        call: what was asked; None where that could not be read, or was not looked at.
        embedded: the vectors; None where there are none.
        began: when its headers were there, in seconds of `time.perf_counter`.
    """

    request_id: bytes
    status: int = InternalError.status
    reason: str = InternalError.reason
    call: EmbedCall | None = None
    embedded: Embedded | None = None
    began: float = field(default_factory=time.perf_counter)

    def end(self, error: RequestError | None) -> None:
        """Set status and reason."""
        self.status, self.reason = (200, "ok") if error is None else (error.status, error.reason)

    @property
    def seconds(self) -> float:
        """How long ago it began."""
        return time.perf_counter() - self.began


class Journal:
    """Counts all requests and logs some.

    Args:
        metrics: of the service.
        slow_request_s: requests for vectors that took longer are logged; may be changed.
    """

    def __init__(self, metrics: Metrics, slow_request_s: float) -> None:
        self.slow_request_s = slow_request_s
        self.count = metrics.request

    def refuse(self, error: RequestError) -> None:
        """Count the answer to what was no request, and has no time therefore."""
        self.count(NO_ROUTE, error.status, error.reason, None)

    def close(self, route: str, entry: Entry) -> None:
        """Count a request for vectors; log it where it was slow or failed after it was taken on.

        What is refused has no line of its own, since there may be thousands a second of these: the
        service says how many.
        """
        seconds = entry.seconds
        self.count(route, entry.status, entry.reason, seconds)
        if entry.call is None or entry.status == ClientGone.status:
            return
        failed = entry.status >= InternalError.status and entry.status != NotReady.status
        if failed or seconds > self.slow_request_s:
            log.warning("%s", _line(entry, entry.call, seconds))


def _line(entry: Entry, call: EmbedCall, seconds: float) -> str:
    """Write `key=value` pairs without a word of the input; what is not known is left out."""
    pairs: dict[str, object] = {
        "id": entry.request_id.decode("ascii"),
        "model": ascii(call.model[:200]),
        "status": entry.status,
        "reason": entry.reason,
        "n_inputs": len(call.inputs),
    }
    if call.key.name:
        pairs["key"] = ascii(call.key.name)
    if entry.embedded is not None:
        pairs |= {
            "tokens": entry.embedded.prompt_tokens,
            "tokenize_s": f"{entry.embedded.tokenize_s:.3f}",
            "queue_s": f"{entry.embedded.queue_s:.3f}",
            "inference_s": f"{entry.embedded.inference_s:.3f}",
        }
    pairs["total_s"] = f"{seconds:.3f}"
    return "request " + " ".join(f"{key}={value}" for key, value in pairs.items())
