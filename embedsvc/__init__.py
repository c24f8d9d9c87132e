"""A text-embedding server that speaks OpenAI's API and batches by sequence length."""

from __future__ import annotations

__version__ = "0.1.0"
