"""Texts to token ids: prompts, truncation, checks; and the threads that do it."""

from __future__ import annotations

import os

from embedsvc.tokenization.pool import TokenizerPool
from embedsvc.tokenization.tokenizer import Tokenizer
from embedsvc.tokenization.tokens import Encoded, Token

__all__ = ["Encoded", "Token", "Tokenizer", "TokenizerPool"]

# The thread that calls does all the work. Left alone, tokenizers spreads each batch over as many
# threads of its own as there are cores, which then fight our threads and the model's.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
