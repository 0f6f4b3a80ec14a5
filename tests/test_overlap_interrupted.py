"""Threads beside the main one end with it, wherever an interrupt falls."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from harvest.overlap import Behind

INTERRUPTED = """
import faulthandler, itertools, random, signal, sys
from harvest.overlap import Ahead, Behind

faulthandler.dump_traceback_later(60, exit=True)  # a thread that waits for ever ends this with 1


def interrupt(number, frame):
    raise KeyboardInterrupt


signal.signal(signal.SIGALRM, interrupt)
dice = random.Random(0)
for _ in range(1500):
    try:
        try:
            {block}
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        pass
"""
AHEAD = """
            with Ahead(itertools.count(), depth=1, name="ahead") as items:
                signal.setitimer(signal.ITIMER_REAL, dice.uniform(1e-4, 1e-3))
                for item in items:
                    pass
"""
BEHIND = """
            with Behind(depth=2, name="behind") as behind:
                signal.setitimer(signal.ITIMER_REAL, dice.uniform(1e-4, 1e-3))
                while True:
                    behind.submit(int)
"""


@pytest.mark.parametrize("block", [AHEAD, BEHIND], ids=["ahead", "behind"])
def test_an_interrupt_at_any_point_leaves_nobody_waiting(block: str) -> None:
    code = INTERRUPTED.replace("{block}", block.strip())
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_calls_behind_another_line_keep_their_order_and_tell_their_end() -> None:
    done: list[str] = []
    with Behind(depth=2, name="second") as second, Behind(depth=2, name="first") as first:
        told = threading.Event()
        for number in range(20):
            first.submit(done.append, f"first {number}")
            later = second.submit(done.append, f"second {number}", after=first, then=told.set)
        assert later.error() is None
        assert told.wait(10)
    for number in range(20):
        assert done.index(f"first {number}") < done.index(f"second {number}")
    assert [one for one in done if one.startswith("second")] == [f"second {number}" for number in range(20)]


def test_an_error_stays_with_its_call_and_after_one_of_the_block_what_waits_is_dropped() -> None:
    release, done = threading.Event(), []
    with Behind(depth=4, name="behind") as behind:
        failed, fine = behind.submit(int, "x"), behind.submit(int, "7")
        assert isinstance(failed.error(), ValueError)
        assert (fine.result(), fine.done) == (7, True)
        with pytest.raises(ValueError, match="invalid literal"):
            failed.result()

    def block() -> None:
        with Behind(depth=4, name="behind") as behind:
            behind.submit(release.wait, 10)
            behind.submit(done.append, "dropped")
            threading.Timer(0.2, release.set).start()
            raise KeyError("the block")

    with pytest.raises(KeyError, match="the block"):
        block()
    assert done == []
