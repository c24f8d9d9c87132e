"""Metrics of several processes: what they add up to, and what stays of one that is gone."""

from __future__ import annotations

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from embedsvc.metrics import LEAST_OF_ALL, MOST_OF_ALL, Metrics
from embedsvc.totals import Family, Totals, families_of, render

ROUTE = "/v1/embeddings"


def metrics(requests: int, *, ready: bool = True, lag: float = 0.0) -> Metrics:
    """Return the metrics of a process that has answered some requests in a second each."""
    found = Metrics()
    found.ready_from(lambda: ready)
    found.loop_lag(lag)
    for _ in range(requests):
        found.request(ROUTE, 200, "ok", 1.0)
    return found


def told(*all_metrics: Metrics) -> Totals:
    """Return the totals of processes named 0, 1, ….

    What they tell goes through the encoding in which it travels.
    """
    totals = Totals()
    for process, one in enumerate(all_metrics):
        encoded = msgspec.msgpack.encode(families_of(one.registry))
        totals.tell(process, msgspec.msgpack.decode(encoded, type=list[Family]))
    return totals


def value(totals: Totals, name: str, **labels: str) -> float:
    """Return the sum of the shown samples with these labels."""
    families = text_string_to_metric_families(totals.render().decode())
    samples = [sample for family in families for sample in family.samples]
    found = [s.value for s in samples if s.name == name and labels.items() <= s.labels.items()]
    assert found, name
    return sum(found)


def test_the_numbers_of_one_process_are_shown_as_it_would_show_them() -> None:
    """Line for line."""
    one = metrics(3, lag=0.25)

    assert render(families_of(one.registry)) == one.render()
    assert told(one).render() == one.render()


def test_counts_and_histograms_add_up() -> None:
    """Bucket by bucket."""
    totals = told(metrics(3), metrics(4))

    assert value(totals, "embedsvc_requests_total", route=ROUTE, status="200") == 7
    assert value(totals, "embedsvc_request_seconds_count") == 7
    assert value(totals, "embedsvc_request_seconds_sum") == 7
    assert value(totals, "embedsvc_request_seconds_bucket", le="0.5") == 0
    assert value(totals, "embedsvc_request_seconds_bucket", le="1.0") == 7


def test_gauges_become_the_sum_the_least_or_the_most() -> None:
    """As it makes sense for each."""
    totals = told(metrics(0, lag=0.5), metrics(0, ready=False, lag=0.25))

    assert value(totals, "embedsvc_workers") == 1
    assert value(totals, "embedsvc_ready") == 0
    assert value(totals, "embedsvc_event_loop_lag_seconds") == 0.5
    assert value(totals, "embedsvc_build_info") == 1


def test_gauges_that_are_not_summed_exist() -> None:
    """A renamed gauge is noticed."""
    gauges = {f.name for f in families_of(Metrics().registry) if f.kind == "gauge"}

    assert gauges >= LEAST_OF_ALL | MOST_OF_ALL


def test_counts_outlive_their_process_and_gauges_do_not() -> None:
    """Also when its successor counts from zero."""
    totals = told(metrics(3), metrics(4))
    totals.forget(0)
    without = value(totals, "embedsvc_requests_total")
    totals.tell(2, families_of(metrics(1).registry))
    totals.forget(1)

    assert without == 7
    assert value(totals, "embedsvc_requests_total") == 8
    assert value(totals, "embedsvc_workers") == 1


def test_a_process_that_told_nothing_leaves_nothing() -> None:
    """It died before anyone had asked."""
    totals = told(metrics(3))
    before = totals.render()
    totals.forget("never heard of")

    assert totals.render() == before
