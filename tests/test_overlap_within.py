"""Waiting for an answer that may never come: the answer, its error, or the time."""

from __future__ import annotations

import threading
import time

import pytest

from harvest.overlap import within


def test_an_answer_or_its_error_comes_through() -> None:
    assert within(5, lambda: 3) == 3
    with pytest.raises(KeyError, match="x"):
        within(5, lambda: {}["x"])


def test_a_call_that_times_out_by_itself_keeps_its_words() -> None:
    def call() -> None:
        raise TimeoutError("the server was slow")

    with pytest.raises(TimeoutError, match="the server was slow"):
        within(5, call)


def test_no_answer_ends_the_wait_and_nobody_hears_of_it_later() -> None:
    release = threading.Event()
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no answer within 0\.05 s"):
        within(0.05, release.wait)
    assert time.monotonic() - begin < 4
    release.set()
