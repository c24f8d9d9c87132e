"""Keys share the device by weight, whatever they send; the laws of the queue hold for each key."""

from __future__ import annotations

from collections import Counter
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from embedsvc.engine.policy import Policy
from embedsvc.engine.sequence import Batch, Key, Priority, Sequence
from embedsvc.tuning.simulate import Arrival, Outcome, replay
from tests.fakes import make_policy, make_request

BULK, INTERACTIVE = Priority.BULK, Priority.INTERACTIVE
ONE, OTHER = Key("one", 1.0), Key("other", 1.0)

lengths = st.lists(st.integers(1, 128), min_size=1, max_size=20)
weights = st.sampled_from([0.01, 0.3, 1.0, 2.5, 100.0])
priorities = st.sampled_from(Priority)


def queue(
    policy: Policy, key: Key, *requests: list[int], priority: Priority = BULK, now: float = 0.0
) -> list[Sequence]:
    all_rows = []
    for lengths in requests:
        _, rows = make_request(lengths, priority=priority, arrival=now, key=key)
        policy.add(rows, now)
        all_rows += rows
    return all_rows


def next_batch(policy: Policy, now: float = 0.0, free_slots: int = 1) -> list[Sequence]:
    batch = policy.next(now, free_slots)
    assert isinstance(batch, Batch)
    return batch.sequences


@settings(max_examples=100, deadline=None)
@given(
    st.tuples(*[st.tuples(weights, priorities, st.lists(lengths, min_size=1, max_size=6))] * 2),
    st.integers(16, 700),
    st.integers(1, 16),
    st.integers(1, 3),
)
def test_backlogged_keys_share_by_weight(
    keys: tuple[tuple[float, Priority, list[list[int]]], ...],
    max_tokens: int,
    max_rows: int,
    free_slots: int,
) -> None:
    """Law: while both wait, neither has had more than a batch over the other, by weight.

    So over any interval the difference is at most a batch of each, by its weight.
    """
    policy = make_policy(max_batch_tokens=max_tokens, max_batch_size=max_rows)
    left, shares, served = Counter[str](), dict[str, float](), Counter[str]()
    for name, (weight, priority, requests) in zip("ab", keys, strict=True):
        queue(policy, Key(name, weight), *requests, priority=priority)
        left[name], shares[name] = sum(map(len, requests)), weight * priority
    bounds = {name: policy.buckets.batch_s / share for name, share in shares.items()}
    while True:
        for row in next_batch(policy, free_slots=free_slots):
            name = row.request.key.name
            left[name] -= 1
            served[name] += policy.cost.row(row.length)  # type: ignore[assignment]  # seconds
        if not all(left.values()):
            return

        lead = served["a"] / shares["a"] - served["b"] / shares["b"]
        assert -bounds["b"] - 1e-9 <= lead <= bounds["a"] + 1e-9


@given(st.lists(st.tuples(st.sampled_from("abc"), priorities, lengths), max_size=12), st.data())
def test_every_row_of_every_key_leaves_once(
    requests: list[tuple[str, Priority, list[int]]], data: st.DataObject
) -> None:
    """Law: nothing is lost or chosen twice, whatever is dropped or sorted anew on the way."""
    policy = make_policy(max_batch_size=4)
    queued = [
        queue(policy, Key(name, 1.0), lengths, priority=priority)
        for name, priority, lengths in requests
    ]
    chosen: list[Sequence] = []
    if queued:
        chosen += next_batch(policy)
    gone = data.draw(st.sets(st.sampled_from(range(len(queued))))) if queued else set()
    for index in gone:
        policy.discard(queued[index][0].request)
    policy.set_edges([50, 128])

    while isinstance(batch := policy.next(0.0, 2), Batch):
        chosen += batch.sequences

    first = {id(row) for row in chosen[:4]}
    kept = [row for index, rows in enumerate(queued) if index not in gone for row in rows]
    assert len({id(row) for row in chosen}) == len(chosen)
    assert {id(row) for row in kept} - first <= {id(row) for row in chosen}
    assert (policy.n_waiting, policy.waiting_tokens) == (0, 0)
    assert not any(policy._waiting.counts)


@settings(max_examples=100, deadline=None)
@given(st.lists(lengths, min_size=1, max_size=9), st.lists(lengths, min_size=1, max_size=9))
def test_age_counts_within_a_key(one: list[list[int]], other: list[list[int]]) -> None:
    """Law: a key that is next sends its oldest head over the age cap, and takes no other's turn."""
    policy = make_policy(max_batch_size=2, max_age_s=2.0)
    heads = {}
    for key, requests in ((ONE, one), (OTHER, other)):
        for lengths in requests:
            rows = queue(policy, key, lengths)
            heads[rows[0].request] = rows
    since = dict.fromkeys(heads, 0.0)
    now = 0.0
    while heads:
        now += 1.1
        lane = policy._waiting.next_lane()
        assert lane is not None
        oldest, at = lane.oldest_head()
        key, chosen = oldest.request.key, next_batch(policy, now)
        if now - at > 2.0:
            assert at == min(since[r] for r in heads if r.key == key)
            assert oldest in chosen
        assert any(row.request.key == key for row in chosen)
        for request, rows in list(heads.items()):
            heads[request] = rest = [row for row in rows if row not in chosen]
            if not rest:
                del heads[request]
            elif rest[0] is not rows[0]:
                since[request] = now


def test_a_flood_of_one_key_does_not_delay_a_query_of_another() -> None:
    """However much a key has waiting, however old and urgent, another's query goes next."""
    policy = make_policy(max_batch_size=8)
    for _ in range(300):
        _, rows = make_request([20] * 3, priority=INTERACTIVE, deadline=20.1, key=ONE)
        policy.add(rows, 0.0)
    for _ in range(5):
        next_batch(policy, now=19.0)
    query = queue(policy, OTHER, [100], priority=INTERACTIVE, now=20.0)

    assert query[0] in next_batch(policy, now=20.0)


def test_a_key_that_was_idle_gets_no_credit() -> None:
    """Whoever comes back shares from now on, and does not catch up on what it never asked for."""
    policy = make_policy(max_batch_size=4, edges=[128])
    queue(policy, ONE, [20] * 200)
    for _ in range(20):
        next_batch(policy)
    queue(policy, OTHER, [20] * 200)

    names = Counter(row.request.key.name for _ in range(20) for row in next_batch(policy))

    assert abs(names["one"] - names["other"]) <= 4


def test_free_rows_are_filled_by_a_key_that_is_not_behind() -> None:
    """A query that is all its key has takes along what others have waiting."""
    policy = make_policy(max_batch_size=8, max_batch_tokens=1024, edges=[128])
    queue(policy, ONE, [20] * 200)
    next_batch(policy)
    queue(policy, OTHER, [20], priority=INTERACTIVE)

    assert Counter(row.request.key.name for row in next_batch(policy)) == {"one": 7, "other": 1}


# --- in simulated time ---------------------------------------------------------------------------


def shares(arrivals: list[Arrival], until: float = inf) -> dict[str, float]:
    """Return each key's share of the predicted cost of what was served until some time."""
    policy = make_policy()
    outcome: Outcome = replay(arrivals, policy, 2, policy.cost)
    seconds = Counter[str]()
    for served in outcome.served:
        if served.at + served.latency_s <= until:
            seconds[served.key.name] += policy.cost.row(served.length)  # type: ignore[assignment]  # seconds
    return {name: value / seconds.total() for name, value in seconds.items()}


MIXED = tuple(5 + 37 * k % 120 for k in range(2000))


def test_three_times_the_weight_is_three_quarters() -> None:
    """A key of weight 3 beside one of weight 1 gets three quarters of the device."""
    uploads = [Arrival(0.0, MIXED, priority=BULK, key=Key(f"w{w}", w)) for w in (3.0, 1.0)]

    assert abs(shares(uploads, until=10.0)["w3.0"] - 0.75) < 0.01


def test_a_hundred_requests_get_no_more_than_one() -> None:
    """What a key gets does not grow with the number of its requests."""
    many = [Arrival(0.0, MIXED[20 * k :][:20], priority=BULK, key=ONE) for k in range(100)]
    single = Arrival(0.0, MIXED, priority=BULK, key=OTHER)

    assert abs(shares([*many, single], until=10.0)["one"] - 0.5) < 0.01


def test_without_keys_each_request_counts() -> None:
    """Two requests of nobody in particular share equally, as do their rows."""
    policy = make_policy()
    rows = [make_request([20] * 200, priority=BULK)[1] for _ in range(3)]
    for of_request in rows:
        policy.add(of_request, 0.0)

    served = Counter(row.request for _ in range(9) for row in next_batch(policy))

    assert max(served.values()) - min(served.values()) <= 1
