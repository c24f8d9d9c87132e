"""`embedsvc serve`, but the weightless model is the one that texts can break.

With an isolated model that one lies in the model's process.
"""

from __future__ import annotations

from embedsvc import cli
from embedsvc.models import hashing
from loadtest.chaos.faulty import FaultyModel


def main() -> None:
    """Serve."""
    hashing.HashModel = FaultyModel  # type: ignore[misc, assignment]
    cli.main()


if __name__ == "__main__":
    main()
