"""Whatever workers do to a run, its tally counts each token once and ends at what the records say."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import record as blank_record

from harvest.outcome import Progress
from harvest.records import Shard, ShardRecord, StoredObject
from harvest.runtime.slices import ReadFacts
from harvest.runtime.tally import Expected, Tally, clock_text

BATCHES = 4
"""Of every shard, 10 tokens each."""


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def shard(number: int) -> Shard:
    return Shard(file=0, index=number, start=8 * number, stop=8 * number + 8)


def record(number: int, *, tokens: int = 10 * BATCHES, documents: int = 8, skipped: int = 1) -> ShardRecord:
    facts = ReadFacts(documents=documents, tokens=tokens, ended=False, cut=False, cursor=None)
    objects = {"residual.0/c.0.0": StoredObject(bytes=100 * BATCHES, crc32c="00000000")}
    made = blank_record(shard(number), facts)
    return replace(made, rows=tokens, skipped={"empty": skipped} if skipped else {}, objects=objects)


def batch(number: int, attempt: int) -> Progress:
    name = f"{shard(number).key}.00000000-{attempt}"
    return Progress(shard=shard(number).key, attempt=name, tokens=10, rows=10, bytes=100, forward_seconds=0.1)


@given(st.integers(0), st.integers(1, 5), st.integers(0, 2))
def test_any_tries_in_any_order_move_it_forward_only_and_end_at_the_records(
    seed: int, shards: int, earlier: int
) -> None:
    """Tries that die, are repeated, run side by side, or go on after another was faster."""
    dice, tally, total = random.Random(seed), Tally(Clock()), 10 * BATCHES * (shards + earlier)
    expected = Expected(documents=8 * (shards + earlier), tokens=total, rows=total, shards=shards + earlier)
    tally.start(expected, [record(shards + number) for number in range(earlier)])
    tries: list[tuple[int, int, int]] = [(number, 1, 0) for number in range(shards)]
    most, left, attempts = tally.tokens, set(range(shards)), 1
    while left:
        at = dice.randrange(len(tries))
        number, attempt, done = tries[at]
        if done < BATCHES:
            tries[at] = (number, attempt, done + 1)
            tally.advanced(batch(number, attempt))
        elif number in left:
            left.remove(number)
            tally.committed(record(number))
        if left and dice.random() < 0.2:  # somebody else begins one, or does so again after a death
            attempts += 1
            tries.append((dice.choice(sorted(left)), attempts, 0))
        assert most <= tally.tokens <= total
        assert tally.rows == tally.tokens
        most = tally.tokens
    assert (tally.tokens, tally.rows) == (total, total)
    assert (tally.shards, tally.documents, tally.skipped) == (
        shards + earlier,
        8 * (shards + earlier),
        shards + earlier,
    )
    assert tally.bytes == 100 * BATCHES * (shards + earlier)
    assert tally.share == 1.0
    assert tally.expected_tokens == total


def test_a_shard_given_up_takes_its_tokens_away_and_is_counted() -> None:
    tally = Tally(Clock())
    tally.start(Expected(documents=16, tokens=80, shards=2), [])
    tally.advanced(batch(0, 1))
    tally.retried()
    tally.gave_up(shard(0).key)
    assert (tally.tokens, tally.failed, tally.retries) == (0, 1, 1)
    assert "1 tried again  1 failed" in tally.counts_text


def test_the_speed_is_the_last_minutes_and_knows_nothing_of_earlier_lives() -> None:
    clock = Clock()
    tally = Tally(clock)
    tally.start(Expected(documents=8000, tokens=40_000, shards=1000), [record(number) for number in range(500)])
    tally.ready()
    assert (tally.tokens_per_second, tally.seconds_left) == (0.0, None)
    for second in range(100):  # 10 tokens a second, and later, with ten workers, 100
        clock.now += 1
        for _ in range(10 if second >= 30 else 1):
            tally.advanced(batch(500 + second, 1))
    assert abs(tally.tokens_per_second - 100) < 3
    assert tally.tokens == 20_000 + 300 + 7000
    assert abs((tally.seconds_left or 0) - (40_000 - 27_300) / 100) < 5
    clock.now += 60
    assert tally.tokens_per_second < 60, "nothing moves any more"


def test_the_share_of_the_forward_is_of_all_workers_time() -> None:
    clock = Clock()
    tally = Tally(clock)
    tally.start(Expected(documents=None, tokens=None, shards=None), [])
    clock.now += 10  # one worker for 10 s, then four for 10 s
    tally.crew(4)
    clock.now += 10
    for number in range(250):
        tally.advanced(batch(number, 1))
    assert abs(tally.forward_share - 25 / 50) < 1e-6
    assert (tally.share, tally.seconds_left) == (None, None)


def test_what_is_expected_is_judged_anew_from_what_is_committed() -> None:
    tally = Tally(Clock())
    tally.start(Expected(documents=80, tokens=1000, rows=900, shards=10), [])
    assert (tally.expected_tokens, tally.expected_rows) == (1000, 900)
    tally.committed(record(0, tokens=50))
    assert (tally.expected_tokens, tally.expected_rows) == (500, 500)
    assert tally.counts_text == "documents 8 of 80 (1 skipped)  tokens 50 of about 500  rows 50  shards 1 of 10"


@pytest.mark.parametrize(
    ("judged", "after"), [("first", 500), (None, 500), ("places", 50 + 900), ("lengths", 50 + 900), ("all", 1000)]
)
def test_a_plan_that_has_seen_more_of_the_data_is_believed_for_more_of_it(judged: str | None, after: int) -> None:
    """The first shard holds short texts; what the plan has seen all over the data is true of the rest."""
    tally = Tally(Clock())
    tally.start(Expected(documents=80, tokens=1000, shards=10, judged=judged), [])
    assert tally.expected_tokens == 1000
    tally.committed(record(0, tokens=50))
    assert tally.expected_tokens == after
    for number in range(1, 10):
        tally.committed(record(number, tokens=105))
    assert tally.expected_tokens == {"all": 1000}.get(judged or "", 995)


def test_times_read_like_a_clock() -> None:
    assert [clock_text(seconds) for seconds in (0.4, 83, 3723, 2 * 86400 + 61)] == [
        "0:00",
        "1:23",
        "1:02:03",
        "2 d 0:01:01",
    ]
