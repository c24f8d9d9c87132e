"""The process of an isolated model, but the weightless model is the one that texts can break."""

from __future__ import annotations

from embedsvc.models import hashing, worker
from loadtest.chaos.faulty import FaultyModel

MODULE = "loadtest.chaos.worker"


def main() -> None:
    """Serve one model until the server is gone."""
    hashing.HashModel = FaultyModel  # type: ignore[misc, assignment]
    worker.main()


if __name__ == "__main__":
    main()
