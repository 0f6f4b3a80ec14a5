"""The report of a run: one self-contained page that says what was run, what it holds, and what it found."""
