"""Test session: offline, few threads, no progress bars."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.update(
    HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TOKENIZERS_PARALLELISM="false", RAY_USAGE_STATS_ENABLED="0"
)
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent / "tests"))
