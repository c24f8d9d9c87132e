"""Lengths read back from metrics and files."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embedsvc.errors import ConfigError
from embedsvc.metrics import TEXT_TOKENS_EDGES, Metrics
from embedsvc.tuning.histogram import LengthHistogram
from embedsvc.tuning.lengths import check_enough, cut, from_metrics, from_numbers


def rendered(max_length: int, texts: list[int], model: str = "m") -> str:
    """Return /metrics after some texts, with a second model beside."""
    metrics = Metrics()
    for name, lengths in ((model, texts), ("other", [1, 2])):
        histogram = LengthHistogram(max_length)
        histogram.add(lengths)
        metrics.version(name, "v1").text_tokens_from(lambda h=histogram: h.totals)  # type: ignore[misc]  # bound now
    return metrics.render().decode()


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_metrics_tell_the_lengths(data: st.DataObject) -> None:
    """Law: whatever arrived, each class of lengths has its texts back, none beyond the maximum."""
    max_length = data.draw(st.sampled_from([13, 256, 510, 8192]))
    texts = data.draw(st.lists(st.integers(1, max_length), max_size=50))

    counts = cut(from_metrics(rendered(max_length, texts), "m"), max_length)

    edges = [0, *(edge for edge in TEXT_TOKENS_EDGES if edge < max_length), max_length]
    expected = [sum(low < n <= high for n in texts) for low, high in pairwise(edges)]
    sums = [counts[low + 1 : high + 1].sum() for low, high in pairwise(edges)]
    np.testing.assert_allclose(sums, expected, atol=1e-9)
    assert counts[0] == 0


def test_a_shorter_model_sees_longer_texts_cut() -> None:
    """Texts over the maximum of the model to tune count as truncated."""
    counts = cut(from_metrics(rendered(512, [8, 300, 400]), "m"), 128)

    assert counts.sum() == pytest.approx(3)
    assert counts[128] == pytest.approx(2)


def test_classes_are_fixed_and_fine() -> None:
    """Bar: multiples of 8 up to 512, then eight an octave."""
    assert TEXT_TOKENS_EDGES[:64] == tuple(range(8, 513, 8))
    for octave in (512, 1024, 16_384):
        inside = [edge for edge in TEXT_TOKENS_EDGES if octave < edge <= 2 * octave]
        assert len(inside) == 8
        assert inside[-1] == 2 * octave


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "has no embedsvc_text_tokens"),
        ("up 1\n", "has no embedsvc_text_tokens"),
        ("<html><body>It works!</body></html>", "is not in Prometheus' text format"),
        (rendered(64, [5], model="another"), "has no model 'm', only another, other"),
    ],
)
def test_other_metrics_are_refused(text: str, complaint: str) -> None:
    """The message says what is there instead."""
    with pytest.raises(ConfigError, match=complaint):
        from_metrics(text, "m")


@pytest.mark.parametrize(
    "text", ["5\n5\n900\n", "length,count\n5,2\n900,1\n", "5;1\n\n5\t1\n 900 , 1 \n"]
)
def test_numbers_are_read_with_and_without_counts(text: str) -> None:
    """One length a line, or with how many; texts over the maximum count as cut."""
    counts = cut(from_numbers(text.splitlines()), 128)

    assert (counts[5], counts[128], counts.sum()) == (2, 1, 3)


@pytest.mark.parametrize("text", ["5\nsix\n", "0\n", "5\n-1\n", "5,1,2\n7,\n", "1.5\n2.5\n"])
def test_a_line_that_is_no_length_is_named(text: str) -> None:
    """The message has the number of the line."""
    with pytest.raises(ConfigError, match=r"line [12] must be a number of tokens"):
        from_numbers(text.splitlines())


def test_few_texts_are_refused() -> None:
    """A tail needs a crowd."""
    with pytest.raises(ConfigError, match="has 99 texts; at least 100"):
        check_enough(from_numbers(["5,99"]))
    check_enough(from_numbers(["5,100"]))
