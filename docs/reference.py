"""The reference pages, written from the code whenever the site is built, so that none is ever out of date.

    python docs/reference.py FOLDER

writes them as files, to read without the site.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from writers import commands, job_file, python, run_folder, sites

PAGES = {
    "commands": commands.page,
    "job_file": job_file.page,
    "sites": sites.page,
    "run_folder": run_folder.page,
    "python": python.page,
}
"""Name of a page -> what writes it, as Markdown."""


def on_files(files: Any, config: Any) -> Any:
    """The hook of mkdocs: adds the pages to those that lie in `pages/`."""
    from mkdocs.structure.files import File

    for name, page in PAGES.items():
        files.append(File.generated(config, f"reference/{name}.md", content=page()))
    return files


def main() -> None:
    """Writes every page into the folder named on the command line."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (folder / f"{name}.md").write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
