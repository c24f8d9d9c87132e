"""Are the vectors right? Built-in texts through a model, compared with what they should give.

Two uses: the self-check at load compares a lower precision with float32, and golden vectors compare
today's vectors with those of an earlier start, so that an upgrade that moves them is noticed.
Knows any `Model`, no torch. Runs where the model is loaded.
"""

from __future__ import annotations

import base64
import binascii
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import numpy as np
import tokenizers

from embedsvc.models import Model
from embedsvc.models.buffers import Ids, Vectors
from embedsvc.models.cache import Cache
from embedsvc.models.source import ModelFolder, load_tokenizer

log = logging.getLogger(__name__)

# A precision that gives less than this against float32 is refused at load.
MIN_SELF_CHECK_COSINE = 0.999
# An upgrade that gives less than this against the stored vectors is reported.
MIN_GOLDEN_COSINE = 0.9999
# The self-check's long text: a forward of 8,192 tokens in float32 would take minutes on a CPU.
MAX_PROBE_TOKENS = 2048

# Different scripts, lengths and kinds, so that tokenizer and model are exercised alike.
TEXTS = (
    "hello",
    "What is the capital of France?",
    "My card was charged twice for the same purchase; how do I get the money back?",
    "def mean(values: list[float]) -> float:\n    return sum(values) / len(values)\n",
    "Die Straße über den Fluss wurde im März 1987 für 3,5 Millionen Mark erneuert.",
    "東京の天気は晴れ、気温は二十五度です。",
    "Привет, как дела? Сегодня мы идём в музей, завтра идём в театр.",
    "🙂 naïve café — 50 % off!! #sale @user https://example.org/a?b=c&d=1",
    "Length-sorted batches waste little of the device on padding. A batch of texts is as wide as "
    "its longest member, so a single long text makes every short one beside it pay for its length. "
    "Grouping texts of similar length before they are padded keeps that cost low, at the price of "
    "a queue for every group and of a rule for which group goes first.",
)

_PACKAGES = ("embedsvc", "torch", "transformers", "tokenizers")


@dataclass(frozen=True, slots=True)
class GoldenResult:
    """What `check_golden` found.

    Attributes:
        status: `stored` for the first time, `same`, `moved`, or `unavailable` where the cache
            directory can be neither read nor written.
        cosine: lowest between then and now; 1.0 where nothing was compared.
        then: versions that made the stored vectors, by package.
        now: versions that run, by package.
    """

    status: Literal["stored", "same", "moved", "unavailable"]
    cosine: float
    then: dict[str, str]
    now: dict[str, str]


def check_golden(model: Model, folder: ModelFolder, cache: Cache) -> GoldenResult:
    """Compare the model's vectors with the stored ones, or store them; warn where they moved.

    Raises:
        ModelError: the folder's tokenizer cannot be read.
    """
    now = versions()
    key = {
        "kind": "golden vectors",
        "weights": folder.weights_id,
        "lower_case": folder.lower_case,
        "modules": [[module.kind, module.config] for module in folder.modules],
        "settings": dict(model.settings),
    }
    vectors = probe(model, load_tokenizer(folder))
    stored = cache.get(key)
    golden = None if stored is None else _decode(stored, vectors.shape)
    if stored is None or golden is None:
        written = cache.put(key, {"versions": now, "vectors": _encode(vectors)})
        return GoldenResult("stored" if written else "unavailable", 1.0, now, now)
    cosine = lowest_cosine(vectors, golden)
    then = {str(name): str(number) for name, number in stored["versions"].items()}
    if cosine >= MIN_GOLDEN_COSINE:
        return GoldenResult("same", cosine, then, now)
    log.warning(
        "the vectors of this model have moved since they were stored; vectors in your index may no "
        "longer match source=%s cosine=%.6f then=%s now=%s; to accept the new ones delete %s",
        folder.source, cosine, _spell(then), _spell(now), cache.path(key),
    )  # fmt: skip
    return GoldenResult("moved", cosine, then, now)


def probe(model: Model, tokenizer: tokenizers.Tokenizer, *, long_text_tokens: int = 0) -> Vectors:
    """Run the built-in texts through a model.

    Args:
        model: a loaded model.
        tokenizer: a private copy; its truncation is changed.
        long_text_tokens: length of one more text, padded together with a short one; 0 leaves
            it out.

    Returns:
        `(texts, dim) float32`, one row a text.
    """
    rows = _ids(tokenizer, TEXTS, model.max_length)
    batches = [rows]
    if long_text_tokens > 0:
        length = min(long_text_tokens, model.max_length)
        batches.append(_ids(tokenizer, (" ".join(TEXTS) * (1 + length // 64), TEXTS[1]), length))
    return np.concatenate([_run(model, batch) for batch in batches])


def lowest_cosine(first: Vectors, second: Vectors) -> float:
    """Return the lowest cosine of two `(rows, dim)` arrays, row by row; -1 for a row not finite."""
    a, b = first.astype(np.float64), second.astype(np.float64)
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    cosines = (a * b).sum(axis=1) / np.maximum(norms, 1e-30)
    return float(np.where(np.isfinite(cosines), cosines, -1.0).min())


def versions() -> dict[str, str]:
    """Return the installed version of every package that can move vectors."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "unknown"
    return found


def _ids(tokenizer: tokenizers.Tokenizer, texts: tuple[str, ...], length: int) -> list[Ids]:
    tokenizer.enable_truncation(length)
    rows = [np.array(e.ids, dtype=np.int64) for e in tokenizer.encode_batch(list(texts))]
    # A script the vocabulary lacks may leave no token at all.
    return [row for row in rows if len(row)]


def _run(model: Model, rows: list[Ids]) -> Vectors:
    length = max(map(len, rows))
    buffer = model.allocate(len(rows) * length, len(rows))
    buffer.fill(rows, [0] * len(rows), length)
    model.forward(buffer, len(rows), length)
    return buffer.output


def _encode(vectors: Vectors) -> str:
    return base64.b64encode(vectors.astype("<f4").tobytes()).decode()


def _decode(stored: Mapping[str, Any], shape: tuple[int, ...]) -> Vectors | None:
    """Return the stored vectors, or None where they are damaged."""
    try:
        data = base64.b64decode(stored["vectors"], validate=True)
        dict(stored["versions"])
        vectors: Vectors = np.frombuffer(data, dtype="<f4").reshape(shape).astype(np.float32)
    except (KeyError, TypeError, ValueError, binascii.Error):
        log.warning("ignoring damaged golden vectors")
        return None
    return vectors


def _spell(numbers: Mapping[str, str]) -> str:
    return ",".join(f"{name} {number}" for name, number in numbers.items())
