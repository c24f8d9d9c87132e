"""Lengths of texts from where people have them: a server's `/metrics`, or a file of numbers.

Pure; files and connections are opened elsewhere.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from embedsvc.errors import ConfigError
from embedsvc.metrics import TEXT_TOKENS_EDGES, TextTokens
from embedsvc.tuning.histogram import Counts

# A 99th percentile of fewer texts is one text.
MIN_TEXTS = 100
_LINE = re.compile(r"\s*(\d{1,9})\s*(?:[,;\t]\s*(\d{1,15})\s*)?")


def from_metrics(text: str, model: str) -> Counts:
    """Return `(longest + 1,)` texts of a model by length, all its versions together.

    Texts of a class of lengths are spread evenly over it. Up to 512 tokens a class is as wide as
    the step of batch widths, so that nothing is lost for them.

    Args:
        text: of `/metrics`.
        model: public name.

    Raises:
        ConfigError: not metrics, or not of this model; without the source.
    """
    up_to: dict[str, dict[float, float]] = defaultdict(lambda: defaultdict(float))
    for labels, texts in _buckets(text):
        up_to[labels["model"]][float(labels["le"])] += texts
    if not up_to:
        raise ConfigError(
            f"has no {TextTokens.name}; it must be the /metrics of an embedsvc server of this "
            "release"
        )
    if model not in up_to:
        served = ", ".join(up_to)
        raise ConfigError(f"has no model {model!r}, only {served}; give its configuration file")
    return _spread(sorted(up_to[model].items()))


def _buckets(text: str) -> Iterator[tuple[dict[str, str], float]]:
    """Yield labels and value of each sample of the length histogram."""
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == f"{TextTokens.name}_bucket":
                    yield sample.labels, sample.value
    except (ValueError, IndexError, KeyError):
        raise ConfigError("is not in Prometheus' text format") from None


def _spread(up_to: Iterable[tuple[float, float]]) -> Counts:
    longest = TEXT_TOKENS_EDGES[-1]
    counts = np.zeros(longest + 1)
    below, before = 0, 0.0
    for edge, texts in up_to:
        top = int(min(edge, longest))
        first = min(below + 1, top)
        counts[first : top + 1] += (texts - before) / (top + 1 - first)
        below, before = top, texts
    return counts


def from_numbers(lines: Iterable[str]) -> Counts:
    """Return `(longest + 1,)` texts by length from lines of `length` or `length,count`.

    A first line that is no number is a heading; empty lines do not count.

    Raises:
        ConfigError: a line is something else; without the name of the file.
    """
    counts: dict[int, int] = defaultdict(int)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        found = _LINE.fullmatch(line)
        if found is not None and int(found[1]) > 0:
            counts[min(int(found[1]), TEXT_TOKENS_EDGES[-1])] += int(found[2] or 1)
        elif number > 1 or found is not None:
            raise ConfigError(
                f"line {number} must be a number of tokens of at least 1, or LENGTH,COUNT"
            )
    dense = np.zeros(max(counts, default=0) + 1)
    dense[list(counts)] = list(counts.values())
    return dense


def cut(counts: Counts, max_length: int) -> Counts:
    """Return `(max_length + 1,)` texts by length; longer ones are cut to the maximum."""
    kept = np.zeros(max_length + 1)
    n = min(len(counts), max_length)
    kept[:n] = counts[:n]
    kept[max_length] = counts[max_length:].sum()
    return kept


def check_enough(counts: Counts) -> None:
    """Check that there are enough texts to judge a tail by.

    Raises:
        ConfigError: there are fewer; without the source.
    """
    n = int(counts.sum())
    if n < MIN_TEXTS:
        raise ConfigError(f"has {n} texts; at least {MIN_TEXTS} are needed, thousands are better")
