"""The commands. Each reads its words, calls one function, prints what it returns, and ends with a documented status.

0: done. 1: the work failed, or damage was found. 2: the request is wrong. 130: interrupted; the same command resumes.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import typer

from harvest import options

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Before torch is loaded. Threads that spin at every barrier while a neighbour holds one of their cores make a forward
# 3 to 10 times slower; our own reader and writer are such neighbours.

os.environ.setdefault("TQDM_DISABLE", "1")  # the bars of the libraries below: the terminal belongs to our own

_BEGIN = time.monotonic()
"""Of the command: what is imported later is part of its start."""

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def begun(version: options.Version = False) -> None:
    """Harvest: language-model activations at dataset scale."""


@app.command()
def plan(
    job: options.JobFile,
    overrides: options.Overrides = None,
    calibrate: options.Calibrate = False,
    workers: options.Workers = None,
    json: options.Json = False,
) -> None:
    """Says what a job will do and need, without running the model; refuses what `run` would refuse."""
    request = _request(job, overrides)
    if workers is not None and not (calibrate and workers > 0):
        from harvest.errors import RequestError

        told = "allowed are whole numbers of at least 1" if calibrate else "how they do is known from --calibrate alone"
        raise RequestError(f"--workers {workers}: {told}{'' if calibrate else '; add it'}")
    from harvest import show
    from harvest.planning.survey import survey
    from harvest.runtime.coordinate import plan_run

    shown = show.plan(found := plan_run(request), survey(found))
    if calibrate:
        from harvest.runtime.calibrate import calibrate as measure

        signal.signal(signal.SIGTERM, signal.default_int_handler)
        measured = measure(found, workers, begin=_BEGIN)
        shown = show.Shown(f"{shown.text}\n\n{measured.text}", {**shown.data, "calibration": measured.data()})
    _print(shown, json)


@app.command()
def run(job: options.JobFile, overrides: options.Overrides = None, json: options.Json = False) -> None:
    """Runs a job, or resumes it where its ledger ends; --json: events, a line each (schemas/events.schema.json)."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.ExitStack() as last:
        from harvest.runtime.telling import run_told

        told = last.enter_context(run_told(sys.stdout)) if json else None
        request = _request(job, overrides)
        if told is not None:
            told.begun(request.run.path)
        from harvest.runtime.resume import refuse_other_job

        refuse_other_job(request)  # before torch and the rest, which take seconds
        from harvest import show
        from harvest.runtime import coordinate

        observer = _observer() if told is None else told
        _say_when_stopped(observer)
        found = coordinate.run(request, observer=observer, begin=_BEGIN)
        shown = show.run(found)
        if told is None:
            _say_what_there_is(shown.text, observer.warned)
        for warning in show.warnings(found):
            observer.warned(warning)
        if told is not None:
            told.completed(shown.data)


@app.command()
def status(
    run: options.RunFolder,
    watch: options.Watch = False,
    every: options.Every = None,
    json: options.Json = False,
) -> None:
    """Committed, running, failed and missing shards of a run; rows and rates."""
    from harvest import show
    from harvest.errors import RequestError
    from harvest.runtime import events
    from harvest.runtime.status import status_of
    from harvest.runtime.telling import Teller, last_word

    if every is not None and not watch:
        raise RequestError(f"--every {every:g}: how often to look is for --watch alone; add it")
    teller = Teller(sys.stdout, run)
    if not watch:
        shown = show.status(status_of(run))
        if json:
            teller.tell(events.Status, **shown.data)
        else:
            _say_what_there_is(shown.text)
        return
    from harvest.runtime import watch as watching

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if json:
        with last_word(teller, events.WatchEnded):
            watching.watch(run, every, lambda found, _: teller.tell(events.Status, **show.status(found).data))
            teller.tell(events.WatchEnded, status=0, error=None)
        return
    with watching.shown(sys.stderr) as seen:
        found = watching.watch(run, every, seen)
    _say_what_there_is(show.status(found).text)


@app.command()
def verify(
    run: options.RunFolder,
    repair: options.Repair = False,
    json: options.Json = False,
) -> None:
    """Re-reads everything a run holds and compares it with the ledger."""
    from harvest import show
    from harvest.checking.verify import verify_run
    from harvest.errors import DamageError

    if repair:
        from harvest.checking.repair import repair_run  # loads what a run needs

        signal.signal(signal.SIGTERM, signal.default_int_handler)
        mended = repair_run(run, observer=None if json else _observer())
        _print(show.Shown(mended.text, mended.data), json)
        report = mended.after
    else:
        report = verify_run(run)
        _print(show.Shown(report.text, report.data), json)
    if report.damaged:
        first = next(finding for finding in report.findings if finding.damage)
        raise DamageError(f"{report.run}: {first}")


@app.command()
def sites(
    model: options.Model,
    json: options.Json = False,
) -> None:
    """The sites and layers that can be captured from a model, with their widths."""
    from harvest import show
    from harvest.model.sites import sites_of

    _print(show.sites(sites_of(model)), json)


@app.command()
def directions(run: options.RunFolder, json: options.Json = False) -> None:
    """The table of directions: name, mode, examples, norm, and what they are worth on held-out examples."""
    from harvest import show
    from harvest.reading.reader import open_run

    _print(show.directions(open_run(run)), json)


@app.command()
def report(
    run: options.RunFolder,
    out: options.Out = None,
    json: options.Json = False,
) -> None:
    """Writes one self-contained page: what was run, what it holds, what it found and how the work went."""
    from harvest import show
    from harvest.reading.reader import open_run
    from harvest.report.write import write_report

    found = write_report(open_run(run), out)
    _print(show.Shown(found["report"], found), json)


@app.command()
def export(
    format: options.Format,
    run: options.RunFolder,
    out: options.NewFolder,
    name: options.Names = None,
    shuffle: options.Shuffle = None,
    dtype: options.Dtype = None,
    context: options.Context = None,
    naming: options.Naming = None,
    rows: options.Rows = None,
    limit: options.Limit = None,
    directions: options.Directions = False,
    json: options.Json = False,
) -> None:
    """Writes rows of a run, with their tokens, in a format that other tools read; --directions: its directions."""
    from harvest import show

    if directions:
        from harvest.export.directions import export_directions

        card = export_directions(format, run, out)
        _print(show.Shown(f"{card['out']}: {', '.join(card['directions'])}; {card['note']}", card), json)
        return
    from harvest.export.card import text
    from harvest.export.export import Request, export_run
    from harvest.runtime import terminal

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    request = Request(
        format=format,
        run=run,
        out=out,
        name=name or (),
        shuffle=shuffle,
        dtype=dtype,
        context=context,
        naming=naming,
        rows=rows,
        limit=limit,
    )
    if json:
        card = export_run(request)
    else:
        with terminal.writing(f"exporting {format}") as advanced:
            card = export_run(request, advanced)
    _print(show.Shown(text(card), card), json)


def _request(job: str, overrides: list[str] | None) -> Any:
    """The job, refused where a setting is wrong by itself: before torch is imported, which takes seconds."""
    from harvest.config import load_job

    return load_job(job, overrides or ())


def _observer() -> Any:
    """Who hears of the work: a person at a terminal, or a log."""
    from harvest.runtime.terminal import person

    return person(sys.stderr)


def _say_when_stopped(observer: Any) -> None:
    """An interrupt is answered at once; what ends the work then takes a while. The next one is Python's own again."""
    numbers = (signal.SIGINT, signal.SIGTERM)

    def stop(number: int, frame: Any) -> None:
        for one in numbers:
            signal.signal(one, signal.default_int_handler)
        with contextlib.suppress(RuntimeError):  # it came while a line was being written
            observer.stopping()
        raise KeyboardInterrupt

    for number in numbers:
        signal.signal(number, stop)


def _print(shown: Any, json: bool) -> None:
    """`shown` has `.text` for people and `.data` for programs."""
    import json as encoder

    _say_what_there_is(encoder.dumps(shown.data, indent=2, default=str) if json else shown.text)


def _say_what_there_is(text: str, warn: Callable[[str], None] | None = None) -> None:
    """Prints it. Where nobody can read it, `warn` is told, if the work is done; else it is what went wrong."""
    from harvest.errors import WorkError

    try:
        print(text, flush=True)
    except OSError as error:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # or Python tries once more at its end
        failed = WorkError(f"what there is to say cannot be written: {error.strerror}")
        if warn is None:
            raise failed from None
        warn(str(failed))


def main() -> None:
    """Entry point of `harvest` and `python -m harvest`."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who started us; what is said goes nowhere, the work goes on
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    status = _status(sys.argv[1:])
    if status == 130:  # all that is left is to tidy up; someone impatient shall not change the status
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    sys.exit(status)


def _status(arguments: list[str]) -> int:
    from harvest.errors import HarvestError, ending

    try:
        result = app(arguments, standalone_mode=False)
        if result == 130:  # what typer makes of an interrupt
            raise KeyboardInterrupt
        return result if isinstance(result, int) else 0
    except HarvestError as error:
        return _say(*ending(error))
    except typer.Exit as ended:
        return int(ended.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        text, status = ending(KeyboardInterrupt())
        return _say(f"{text}: {shlex.join(['harvest', *arguments])}" if arguments[:1] == ["run"] else text, status)
    except Exception as error:
        if hasattr(error, "format_message"):  # a usage error of click, which typer carries inside or beside itself
            return _say(_split_setting(arguments) or _usage(error), 2)
        traceback.print_exc()
        return _say(*ending(error))


def _split_setting(arguments: list[str]) -> str | None:
    """`--set data.limit 5` is one word too many, and says nothing of `--set` where it is one."""
    for option, setting, *value in zip(arguments, arguments[1:], [*arguments[2:], ""]):
        if option == "--set" and "=" not in setting and "." in setting:
            given = value[0] if value[0] and not value[0].startswith(("-", "=")) else "VALUE"
            return f"--set {setting}: allowed is KEY.SUB=VALUE in one word, such as --set {setting}={given}"
    return None


def _usage(error: Any) -> str:
    """What is wrong with a command line, in our words, and what lists what is allowed."""
    context, command = getattr(error, "ctx", None), ""
    if context is not None and context.parent is not None:
        command = f" {context.info_name}"
    said = re.sub(r": Input should be a valid integer.*", ": allowed are whole numbers", error.format_message())
    if not said:  # a command alone, whose help has been printed instead
        said = "no command is given"
    said = said[0].lower() + said[1:].rstrip(".")
    return f"{said}; harvest{command} --help lists what is allowed"


def _say(text: str, status: int) -> int:
    print(f"harvest: {' '.join(text.split())}", file=sys.stderr, flush=True)
    return status


if __name__ == "__main__":
    main()
