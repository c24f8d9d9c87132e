"""Threads that tokenize what would hold the event loop too long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import TypeVar

from embedsvc.config import Truncation
from embedsvc.errors import NotReady
from embedsvc.tokenization.tokenizer import Tokenizer
from embedsvc.tokenization.tokens import Encoded, Token

T = TypeVar("T")

# Tokenized on the event loop: at 0.3 µs a character this holds it for about a millisecond, ten
# times what a change of threads costs. Measured: all-MiniLM-L6-v2, a Xeon core, 20 µs for 50
# characters, 260 µs for 1,000.
INLINE_CHARACTERS = 4_000
# What a text costs whatever its length.
CHARACTERS_OF_A_TEXT = 30
# A thread's share of many texts: large beside the hand-over, small beside other people's patience.
CHUNK_CHARACTERS = 16_000


class TokenizerPool:
    """Threads that tokenize what would hold the event loop too long.

    Created and used on the event loop.
    """

    def __init__(self, n_threads: int) -> None:
        self._n_threads = n_threads
        self._executor = ThreadPoolExecutor(n_threads, thread_name_prefix="tokenize")
        self._closed = False

    async def encode(
        self,
        tokenizer: Tokenizer,
        texts: Sequence[str],
        *,
        truncate: Truncation,
        prompt: str = "",
        add_special_tokens: bool = True,
    ) -> list[Encoded]:
        """Tokenize as `Tokenizer.encode` does: short inputs at once, others on the threads.

        One call has at most one piece of work per thread waiting, so that calls take turns.

        Raises:
            InvalidRequest: as `Tokenizer.encode`; of several errors, that of the first text.
            NotReady: the pool is closed.
        """
        encode = partial(
            tokenizer.encode,
            truncate=truncate,
            prompt=prompt,
            add_special_tokens=add_special_tokens,
        )
        return await self._in_turns(encode, texts, prompt)

    async def tokens(
        self,
        tokenizer: Tokenizer,
        texts: Sequence[str],
        *,
        prompt: str = "",
        add_special_tokens: bool = True,
    ) -> list[Sequence[Token]]:
        """Do as `Tokenizer.tokens` for each text, in the same turns as `encode`.

        Raises:
            InvalidRequest: as `Tokenizer.tokens`; of several errors, that of the first text.
            NotReady: the pool is closed.
        """
        tokens = partial(tokenizer.tokens, prompt=prompt, add_special_tokens=add_special_tokens)
        return await self._in_turns(
            lambda part, first_index=0: [tokens(text) for text in part], texts, prompt
        )

    async def _in_turns(
        self, work: Callable[..., list[T]], texts: Sequence[str], prompt: str
    ) -> list[T]:
        """Do `work(part, first_index=index)` for all parts of the texts and join the results."""
        weights = [_weight(text) + len(prompt) for text in texts]
        if sum(weights) <= INLINE_CHARACTERS:
            return work(texts)
        done: list[T] = []
        parts = _parts(texts, weights)
        while wave := list(islice(parts, self._n_threads)):
            done += await self._run([partial(work, p, first_index=i) for p, i in wave])
        return done

    async def _run(self, work: list[Callable[[], list[T]]]) -> list[T]:
        """Run one piece of work a thread and join the results in order."""
        if self._closed:
            raise NotReady("The server is stopping.", retry_after_s=5)
        loop = asyncio.get_running_loop()
        futures = [loop.run_in_executor(self._executor, one) for one in work]
        done: list[T] = []
        # Waits for all before it tells of one, so that the first error in order is told.
        for result in await asyncio.gather(*futures, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
            done += result
        return done

    async def close(self) -> None:
        """Wait for running work and end the threads; calls under way get `NotReady`."""
        self._closed = True
        await asyncio.to_thread(self._executor.shutdown)


def _weight(text: str) -> int:
    """Return the work of a text in characters; one that is no text is told when it is encoded."""
    return CHARACTERS_OF_A_TEXT + (len(text) if isinstance(text, str) else 0)


def _parts(texts: Sequence[str], weights: list[int]) -> Iterator[tuple[Sequence[str], int]]:
    """Split texts into runs of about `CHUNK_CHARACTERS`, each with the index of its first text."""
    first = total = 0
    for last, weight in enumerate(weights, 1):
        total += weight
        if total >= CHUNK_CHARACTERS or last == len(texts):
            yield texts[first:last], first
            first, total = last, 0
