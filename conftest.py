"""Test session: offline, few threads, no progress bars."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

os.environ.update(
    HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TOKENIZERS_PARALLELISM="false", RAY_USAGE_STATS_ENABLED="0"
)
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent / "tests"))

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background jobs ignore Ctrl-C and pass that on to every process that they start; the tests send it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

if os.environ.get("HARVEST_RAISED"):
    import raised  # noqa: F401  # notes which messages the tests make (tests/raised.py)
