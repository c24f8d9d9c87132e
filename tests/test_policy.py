"""The laws of the batch choice, without threads or clocks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embedsvc.engine.buckets import first_edges, half_powers_of_two, padded_width
from embedsvc.engine.correction import Corrected
from embedsvc.engine.cost import CostModel
from embedsvc.engine.policy import Policy
from embedsvc.engine.sequence import Batch, Priority, Sequence
from embedsvc.metrics import WIDTH_CLASS_NAMES
from tests.fakes import make_policy, make_request

lengths_of_request = st.lists(st.integers(1, 128), min_size=1, max_size=20)
requests = st.lists(lengths_of_request, min_size=1, max_size=15)


def drain(policy: Policy, now: float = 0.0, free_slots: int = 1) -> list[Batch]:
    batches = []
    while isinstance(batch := policy.next(now, free_slots), Batch):
        batches.append(batch)
    return batches


def queue(policy: Policy, *requests: list[int], now: float = 0.0) -> list[list[Sequence]]:
    all_rows = []
    for lengths in requests:
        _, rows = make_request(lengths, arrival=now)
        policy.add(rows, now)
        all_rows.append(rows)
    return all_rows


@given(requests, st.integers(1, 4))
def test_every_row_leaves_exactly_once(requests: list[list[int]], free_slots: int) -> None:
    """Law: nothing is lost, nothing is chosen twice, counters return to zero."""
    policy = make_policy()
    queued = [row for rows in queue(policy, *requests) for row in rows]

    chosen = [row for batch in drain(policy, free_slots=free_slots) for row in batch.sequences]

    assert sorted(map(id, chosen)) == sorted(map(id, queued))
    assert (policy.n_waiting, policy.waiting_tokens) == (0, 0)


@given(requests, st.integers(8, 700), st.integers(1, 16), st.integers(1, 3))
def test_every_batch_is_within_its_limits(
    requests: list[list[int]], max_tokens: int, max_rows: int, free_slots: int
) -> None:
    """Law: tokens, rows and length of a batch stay in bounds; one row is always legal."""
    policy = make_policy(max_batch_tokens=max_tokens, max_batch_size=max_rows)
    queue(policy, *requests)

    for batch in drain(policy, free_slots=free_slots):
        longest = max(row.length for row in batch.sequences)

        assert batch.length == padded_width(longest, 128)
        assert batch.rows == 1 or batch.rows * batch.length <= max_tokens
        assert batch.rows <= max_rows


@given(requests, st.data())
def test_discarded_requests_never_appear(requests: list[list[int]], data: st.DataObject) -> None:
    """Law: rows of a discarded request are in no later batch; the others all are."""
    policy = make_policy()
    queued = queue(policy, *requests)
    first = policy.next(0.0, 1)
    assert isinstance(first, Batch)
    gone = data.draw(st.sets(st.sampled_from(range(len(queued)))))
    for index in gone:
        policy.discard(queued[index][0].request)

    later = {id(row) for batch in drain(policy) for row in batch.sequences}

    before = {id(row) for row in first.sequences}
    for index, rows in enumerate(queued):
        expected = set() if index in gone else {id(row) for row in rows} - before
        assert later & {id(row) for row in rows} == expected
    assert (policy.n_waiting, policy.waiting_tokens) == (0, 0)


@given(lengths_of_request)
def test_rows_of_one_length_leave_in_their_order(lengths: list[int]) -> None:
    """Law: first in, first out inside a request, bucket by bucket."""
    policy = make_policy(max_batch_size=3)
    queue(policy, lengths)

    chosen = [row for batch in drain(policy) for row in batch.sequences]

    for bucket in {row.bucket for row in chosen}:
        rows = [row.row for row in chosen if row.bucket == bucket]
        assert rows == sorted(rows)


@settings(max_examples=200)
@given(requests, st.lists(st.floats(0, 3), min_size=30, max_size=30))
def test_the_oldest_head_over_the_age_cap_is_in_the_batch(
    requests: list[list[int]], steps: list[float]
) -> None:
    """Law: whenever some head is older than the cap, the oldest such head goes now."""
    policy = make_policy(max_batch_size=2, max_age_s=2.0)
    now = 0.0
    heads = {rows[0].request: list(rows) for rows in queue(policy, *requests)}
    since = dict.fromkeys(heads, now)
    for step in steps:
        now += step
        aged = [request for request in heads if now - since[request] > 2.0]
        oldest = min((since[request] for request in aged), default=inf)
        batch = policy.next(now, 1)
        if not isinstance(batch, Batch):
            break
        if aged:
            candidates = {id(heads[r][0]) for r in aged if since[r] == oldest}
            assert candidates & {id(row) for row in batch.sequences}
        for request, rows in list(heads.items()):
            head = rows[0]
            heads[request] = rows = [row for row in rows if row not in batch.sequences]
            if not rows:
                del heads[request]
            elif rows[0] is not head:
                since[request] = now


def test_expired_rows_are_dropped_before_the_choice() -> None:
    """A row whose deadline passed reaches no batch."""
    policy = make_policy()
    _, dead = make_request([10], deadline=1.0)
    _, alive = make_request([10], deadline=9.0)
    policy.add(dead, 0.0)
    policy.add(alive, 0.0)

    (batch,) = drain(policy, now=2.0)

    assert batch.sequences == alive


def test_an_urgent_row_leads() -> None:
    """A row near its deadline goes before rows with smaller tags, in another bucket or not."""
    policy = make_policy(max_batch_size=1, cost=CostModel(0.1, 0, 0, 0))
    queue(policy, [8], [8])
    _, urgent = make_request([100], deadline=0.2)
    policy.add(urgent, 0.0)

    batch = policy.next(0.0, 1)

    assert isinstance(batch, Batch)
    assert batch.sequences == urgent


def test_a_row_is_urgent_earlier_where_batches_take_longer() -> None:
    """What counts as near follows the 95th percentile of batch times."""
    policy = make_policy(max_batch_size=1, cost=CostModel(0.1, 0, 0, 0))
    queue(policy, [8], [8])
    _, later = make_request([100], deadline=0.5)
    policy.add(later, 0.0)
    assert next_rows(policy) != later

    policy.correct(Corrected((3.0,) * len(WIDTH_CLASS_NAMES)))

    assert next_rows(policy) == later


def next_rows(policy: Policy) -> list[Sequence]:
    batch = policy.next(0.0, 1)
    assert isinstance(batch, Batch)
    return batch.sequences


def test_a_query_does_not_wait_for_an_upload() -> None:
    """An interactive text that arrives behind 500 bulk rows is in one of the next two batches."""
    policy = make_policy(max_batch_size=8)
    _, upload = make_request([20] * 500, priority=Priority.BULK)
    policy.add(upload, 0.0)
    policy.next(0.0, 1)
    _, query = make_request([20])
    policy.add(query, 0.0)

    two = [policy.next(0.0, 1), policy.next(0.0, 1)]

    assert any(isinstance(b, Batch) and query[0] in b.sequences for b in two)


@given(st.integers(1, 3), st.integers(1, 3), st.sampled_from(Priority))
def test_backlogged_flows_share_by_weight(short: int, long: int, priority: Priority) -> None:
    """Law: served cost of two backlogged requests differs by at most one batch, by weight."""
    policy = make_policy(max_batch_size=4, max_batch_tokens=64 * 4)
    _, a = make_request([8 * short] * 400, priority=priority)
    _, b = make_request([8 * long] * 400, priority=Priority.BULK)
    policy.add(a, 0.0)
    policy.add(b, 0.0)
    served = {a[0].request: 0.0, b[0].request: 0.0}
    largest = 0.0
    for _ in range(40):
        batch = policy.next(0.0, 1)
        assert isinstance(batch, Batch)
        largest = max(largest, sum(policy.cost.row(row.length) for row in batch.sequences))
        for row in batch.sequences:
            served[row.request] += policy.cost.row(row.length) / row.request.priority

        one, other = served.values()
        assert abs(one - other) <= largest + 1e-9


def test_short_and_long_rows_part_where_padding_costs_more_than_a_batch() -> None:
    """A short leader does not carry long rows along, nor pays for them."""
    policy = make_policy(max_length=512, max_batch_tokens=100_000, max_batch_size=64)
    queue(policy, *[[8]] * 20, *[[500]] * 20)

    batches = drain(policy)

    assert sorted((b.rows, b.length) for b in batches) == [(20, 8), (20, 504)]


def test_neighbours_are_merged_where_a_batch_costs_more_than_padding() -> None:
    """One batch instead of many where the price of a batch is high."""
    policy = make_policy(cost=CostModel(1.0, 1e-6, 1e-6, 0), max_batch_tokens=10_000)
    queue(policy, [5], [20], [60], [128])

    assert [batch.rows for batch in drain(policy)] == [4]


def test_rows_ride_for_nothing_below_the_floor() -> None:
    """Where a batch takes its least time anyway, other buckets join instead of going alone."""
    cost = CostModel(1e-4, 1e-4, 1e-5, 0)
    apart, together = (
        make_policy(cost=replace(cost, floor=floor), max_batch_tokens=10_000)
        for floor in (0.0, 1.0)
    )
    for policy in (apart, together):
        queue(policy, *[[5]] * 3, *[[120]] * 3)

    assert len(drain(apart)) == 2
    assert len(drain(together)) == 1


def test_a_model_whose_rows_cost_nothing_is_served() -> None:
    """Free slots share rows only where rows cost something."""
    policy = make_policy(cost=CostModel(1.0, 0, 0, 0))
    queue(policy, [16] * 20)

    assert [batch.rows for batch in drain(policy, free_slots=2)] == [20]


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """Yield every way to cut a list into neighbouring groups."""
    for cuts in itertools.product([False, True], repeat=max(0, len(items) - 1)):
        groups = [[items[0]]]
        for item, cut in zip(items[1:], cuts, strict=True):
            groups.append([item]) if cut else groups[-1].append(item)
        yield groups


@given(
    st.lists(st.integers(0, 6), min_size=8, max_size=8).filter(any),
    st.floats(0, 2),
    st.floats(0, 0.1),
    st.floats(0, 3),
)
def test_the_queue_is_partitioned_at_least_cost(
    counts: list[int], c0: float, c1: float, floor: float
) -> None:
    """Law: with room for all rows, serving the whole queue costs what the best partition of the
    buckets into neighbouring groups costs, found by trying all."""
    cost = CostModel(c0, c1, 0.01, 0.0001, floor)
    edges = list(range(8, 72, 8))
    policy = make_policy(64, 100_000, 1000, cost, edges)
    queue(policy, *([edge] for edge, n in zip(edges, counts, strict=True) for _ in range(n)))

    held = [bucket for bucket, n in enumerate(counts) if n]
    best = min(
        sum(cost(sum(counts[b] for b in group), edges[group[-1]]) for group in groups)
        for groups in partitions(held)
    )

    assert sum(batch.predicted_s for batch in drain(policy)) == pytest.approx(best)


def test_idle_slots_share_one_request() -> None:
    """Rows of one length are spread over the free slots where nothing else waits."""
    policy = make_policy(max_batch_tokens=10_000, cost=CostModel(1e-3, 1e-3, 0, 0))
    queue(policy, [16] * 20)

    first = policy.next(0.0, 2)

    assert isinstance(first, Batch)
    assert first.rows == 10


def test_no_delay_means_go_at_once() -> None:
    """A free device never waits by default."""
    policy = make_policy()
    queue(policy, [10])

    assert isinstance(policy.next(0.0, 1), Batch)


def test_a_delay_waits_only_while_arrivals_make_it_cheaper() -> None:
    """With a delay allowed and rows streaming in, the device waits until the delay ends."""
    policy = make_policy(max_batch_delay_s=0.02, cost=CostModel(0.1, 1e-6, 0, 0))
    for step in range(20):
        queue(policy, [10], now=step * 0.001)
    policy.next(0.1, 1)
    queue(policy, [10], now=0.101)

    again = policy.next(0.101, 1)

    assert again == pytest.approx(0.121)
    assert isinstance(policy.next(0.1211, 1), Batch)


def test_an_empty_queue_waits_for_ever() -> None:
    """Nothing waits, nothing to ask again for."""
    assert make_policy().next(0.0, 1) == inf


@pytest.mark.parametrize("max_length", [1, 7, 8, 100, 128, 256, 512, 8192])
@pytest.mark.parametrize("make_edges", [half_powers_of_two, first_edges])
def test_built_in_edges_ascend_to_the_maximum(
    max_length: int, make_edges: Callable[[int], list[int]]
) -> None:
    """Edges ascend strictly, end at the model's maximum, and are not too many."""
    edges = make_edges(max_length)

    assert edges == sorted(set(edges))
    assert edges[-1] == max_length
    assert len(edges) <= 32


def test_edges_that_do_not_reach_the_maximum_are_refused() -> None:
    """A policy whose last edge is not the maximum would lose long rows."""
    with pytest.raises(ValueError, match="ascend to 128"):
        make_policy(edges=[8, 64])


@given(requests, st.sets(st.integers(1, 127), max_size=6))
def test_other_edges_lose_and_reorder_nothing(requests: list[list[int]], inner: set[int]) -> None:
    """Law: after a switch of edges every waiting row is still there, in fair-queueing order."""
    policy = make_policy(max_batch_size=3)
    queued = [row for rows in queue(policy, *requests) for row in rows]
    first = policy.next(0.0, 1)
    assert isinstance(first, Batch)

    policy.set_edges([*sorted(inner), 128])

    waiting = [row for row in queued if row.waiting]
    assert [row.bucket for row in waiting] == [policy.buckets.index(r.length) for r in waiting]
    batches = drain(policy)
    rest = {id(row) for row in queued} - {id(row) for row in first.sequences}
    assert {id(row) for batch in batches for row in batch.sequences} == rest
    leaders = [min(row.tag for row in batch.sequences) for batch in batches]
    assert leaders == sorted(leaders)


def test_what_is_known_of_memory_survives_other_edges() -> None:
    """A device that ran out of memory is not asked for the same again after a switch."""
    policy = make_policy(max_batch_size=16, max_batch_tokens=10_000)
    policy.shrink(16, 64)

    policy.set_edges([32, 100, 128])

    queue(policy, *[[100]] * 32, *[[10]] * 32)
    assert next(b.rows for b in drain(policy) if b.length > 64) == 8
