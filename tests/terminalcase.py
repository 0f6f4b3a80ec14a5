"""A command in a terminal of its own: what it writes there, and what a person then sees."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
import time
from collections.abc import Sequence
from dataclasses import dataclass

MOVES = re.compile(rb"\x1b\[(\d*)([A-Za-z])|\x1b\[\?(\d+)([hl])|\x1b\[[\d;]*m|\r\n|\r|\n|[^\x1b\r\n]+")
"""What rich writes: moves of the cursor, erased lines, modes, colours, ends of lines, text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    status: int
    out: bytes
    """Stdout, which is no terminal."""
    shown: bytes
    """Everything that came to the terminal."""


def in_terminal(
    command: Sequence[str], *, columns: int = 100, until: str = "", keys: bytes = b"", term: str = "xterm-256color"
) -> Found:
    """Runs it with stdin and stderr on a terminal; `keys` are pressed once `until` has been drawn there three times."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
    modes = termios.tcgetattr(theirs)
    modes[3] &= ~termios.ECHO  # what is pressed would stand in the middle of what is drawn
    termios.tcsetattr(theirs, termios.TCSANOW, modes)
    environment = {**os.environ, "TERM": term, "OMP_NUM_THREADS": "1"}
    environment.pop("COLUMNS", None)

    def controlling() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    life = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=environment,
        preexec_fn=controlling,  # a keyboard's Ctrl-C goes to whoever has the terminal
    )
    os.close(theirs)
    shown, deadline = b"", time.monotonic() + 200
    while time.monotonic() < deadline:
        try:
            shown += os.read(ours, 65536)
        except OSError:  # the last one has closed it
            break
        if keys and shown.count(until.encode()) >= 3:
            os.write(ours, keys)
            keys = b""
    assert life.stdout is not None
    out = life.stdout.read()
    os.close(ours)
    return Found(status=life.wait(timeout=60), out=out, shown=shown)


def screen(shown: bytes, columns: int) -> list[str]:
    """The lines that stand there at the end. Fails for a line that is wider than the terminal, or an unknown code."""
    lines, row, column, at = [""], 0, 0, 0
    while at < len(shown):
        found = MOVES.match(shown, at)
        assert found is not None, shown[at : at + 20]
        at, text = found.end(), found[0]
        if text == b"\r":
            column = 0
        elif text in (b"\n", b"\r\n"):
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif found[2] == b"A":
            row -= int(found[1] or 1)
        elif found[2] == b"K":
            lines[row] = ""
        elif not text.startswith(b"\x1b"):
            piece = text.decode()
            lines[row] = lines[row][:column].ljust(column) + piece + lines[row][column + len(piece) :]
            column += len(piece)
            assert column <= columns, f"{column} of {columns}: {lines[row]!r}"
    return lines
