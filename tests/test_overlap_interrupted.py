"""Threads beside the main one end with it, wherever an interrupt falls."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
