"""One file per format of `harvest export`, called as the format is; each has a FORMAT."""
