"""Submits a job to a Ray cluster, follows its log, and ends with the exit status that `harvest run` ends with there.

    python jobs/submit.py jobs/demo.toml --address http://127.0.0.1:8265 --set run.path=/shared/runs/demo
    python jobs/submit.py --follow ID     # again, from the log's beginning; also --status ID and --stop ID

Harvest must be installed on the cluster. Of this machine only the job file travels: relative paths of a model or of
data that lie here are made absolute, for a disk that both sides see, and `run.path` must be absolute or a URL.
A second submission of the same job resumes the run. Ray's token is taken from where Ray looks for it (RAY_AUTH_TOKEN,
RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token).
"""

from __future__ import annotations

import argparse
import asyncio
import glob
import json
import logging
import os
import re
import secrets
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp
from ray.exceptions import RayError
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from harvest.config import Job, load_job
from harvest.errors import HarvestError, RequestError, WorkError

POLL_SECONDS = 1.0
LOST_SECONDS = 60.0
"""Without an answer from the cluster, a follower gives up; the job may well go on."""
NOT_FOUND = 127
"""The status of a shell that does not find the command."""
STOP_SECONDS = 30
"""For a job that is asked to stop to give its lease back, before it is killed; Ray's own default is 3."""
SILENT = (aiohttp.ClientError, OSError, RuntimeError, RayError)
"""What a cluster that does not answer, or refuses, looks like through Ray's client (requests' errors are OSErrors)."""
ADDRESSES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
"""Variables that Ray's client puts before the address that it is given."""


def main() -> int:
    """Does what the command line asks for; returns the exit status."""
    options = _options()
    for chatty in ("", ".dashboard.modules.dashboard_sdk", ".dashboard.modules.job.sdk"):
        logging.getLogger(f"ray{chatty}").setLevel(logging.WARNING)
    try:
        if options.job is None:
            client, submission = connect(options.address), options.follow or options.status or options.stop
        else:
            command = command_for(options.job, options.set)
            client = connect(options.address)
            submission = submit(client, options.job, command, load_job(options.job, options.set))
            print(f"submitted {submission}", flush=True)
        if options.status:
            return show_status(client, submission)
        if options.stop:
            return stop(client, submission)
        return 0 if options.no_follow else follow(client, submission, options.address)
    except HarvestError as error:
        return _say(str(error), error.status)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("job", nargs="?", metavar="JOB", type=Path, help="the job file (TOML)")
    what.add_argument("--follow", metavar="ID", help="follow a job that was submitted earlier")
    what.add_argument("--status", metavar="ID", help="say how a job is")
    what.add_argument("--stop", metavar="ID", help="stop a job; submitting it again resumes")
    parser.add_argument("--address", help="of the cluster's dashboard, such as http://127.0.0.1:8265")
    parser.add_argument("--set", action="append", default=[], metavar="KEY.SUB=VALUE", help="as of `harvest run`")
    parser.add_argument("--no-follow", action="store_true", help="return as soon as the job is submitted")
    return parser.parse_args()


# ---- what is submitted ------------------------------------------------------------------------------------------


def command_for(job_file: Path, overrides: Sequence[str]) -> list[str]:
    """The command that runs beside a copy of the job file, on a machine where relative paths of this one mean nothing.

    Raises RequestError for a job that is wrong, and for a place of results that only this machine would know.
    """
    job = load_job(job_file, overrides)
    path = job.run.path
    if "://" not in path and not os.path.isabs(path):
        raise RequestError(
            f"run.path = {path!r}: the job runs elsewhere; allowed are an absolute path that every node sees, and a URL"
        )
    if job.run.address is not None:
        raise RequestError(
            f"run.address = {job.run.address!r}: it runs on the cluster that it was submitted to; leave it out"
        )
    settings = [*overrides, *made_absolute(job)]
    return ["harvest", "run", job_file.name, *(word for setting in settings for word in ("--set", setting))]


def made_absolute(job: Job) -> list[str]:
    """Overrides for every setting that names something on this disk by a path that only holds here."""
    named = {
        "model.name": job.model.name,
        "model.adapter": job.model.adapter,
        "tokens.tokenizer": job.tokens.tokenizer,
        "data.path": job.data.path,
    }
    return [
        f"{setting}={json.dumps(os.path.abspath(os.path.expanduser(value)), ensure_ascii=False)}"
        for setting, value in named.items()
        if value is not None and _lies_here(value)
    ]


def _lies_here(value: str) -> bool:
    if "://" in value or value.startswith("package:") or os.path.isabs(value):
        return False
    path = os.path.expanduser(value)
    return os.path.exists(path) or any(True for _ in glob.iglob(path, recursive=True))


def submit(client: JobSubmissionClient, job_file: Path, command: Sequence[str], job: Job) -> str:
    """Hands the job over; returns its id, which carries the run's name."""
    run = re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(job.run.path.rstrip("/")).name) or "run"
    with tempfile.TemporaryDirectory(prefix="harvest-submit-") as folder:
        shutil.copy(job_file, folder)
        try:
            submission: str = client.submit_job(
                entrypoint=shlex.join(command),
                submission_id=f"harvest-{run}-{secrets.token_hex(3)}",
                runtime_env={"working_dir": folder, "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_SECONDS)}},
            )
        except SILENT as error:
            raise WorkError(f"the cluster does not take the job: {_line(error)}") from error
    return submission


# ---- what becomes of it -----------------------------------------------------------------------------------------


def connect(address: str | None) -> JobSubmissionClient:
    """A client of the cluster at `address`, or where Ray itself finds one. RequestError where none answers."""
    if address is not None:
        for variable in ADDRESSES:
            os.environ.pop(variable, None)
    try:
        return JobSubmissionClient(address)
    except (*SILENT, ValueError) as error:
        raise RequestError(f"--address {address or '(none given)'}: {_line(error)}") from error


def follow(client: JobSubmissionClient, submission: str, address: str | None) -> int:
    """Prints the job's log until it ends; returns its exit status, 130 where it was stopped or Ctrl-C ended this."""
    _info(client, submission)
    try:
        asyncio.run(print_log(client, submission))
    except KeyboardInterrupt:
        again = f"{submission} --address {address}" if address else submission
        print(f"\nnot following any more; {submission} goes on", file=sys.stderr)
        print(f"  follow again: python jobs/submit.py --follow {again}", file=sys.stderr)
        print(f"  stop it:      python jobs/submit.py --stop {again}", file=sys.stderr, flush=True)
        return 130
    return ending(client, submission)


async def print_log(client: JobSubmissionClient, submission: str) -> None:
    """The log as it grows, until the job has ended; where the connection breaks it is taken up at the same sign.

    Raises WorkError where the cluster has not answered for a minute.
    """
    printed, heard = 0, time.monotonic()
    while True:
        try:
            seen = 0
            async for text in client.tail_job_logs(submission):
                print(text[max(0, printed - seen) :], end="", flush=True)
                seen, heard = seen + len(text), time.monotonic()
                printed = max(printed, seen)
            if client.get_job_info(submission).status.is_terminal():
                return
            heard = time.monotonic()
        except SILENT as error:
            if time.monotonic() - heard > LOST_SECONDS:
                raise WorkError(
                    f"the cluster has not answered for {LOST_SECONDS:.0f} s ({_line(error)}); "
                    f"{submission} may go on: --follow and --status tell when it answers again"
                ) from error
        await asyncio.sleep(POLL_SECONDS)


def ending(client: JobSubmissionClient, submission: str) -> int:
    """The exit status of a job that has ended, with a line where its own log cannot say why."""
    info = _info(client, submission)
    if info.status == JobStatus.SUCCEEDED:
        return 0
    if info.status == JobStatus.STOPPED:
        return _say(f"{submission}: stopped; submitting the same job resumes", 130)
    if info.driver_exit_code is None:
        return _say(f"{submission}: {_line(info.message or 'failed before it began')}", 1)
    if info.driver_exit_code == NOT_FOUND:
        return _say(
            f"{submission}: no `harvest` on the PATH that `ray start` had on the head; activate its environment first",
            NOT_FOUND,
        )
    return int(info.driver_exit_code) if info.driver_exit_code > 0 else 128 - info.driver_exit_code


def show_status(client: JobSubmissionClient, submission: str) -> int:
    """One line: how it is, since when."""
    info = _info(client, submission)
    begin, end = (info.start_time or 0) / 1e3, (info.end_time or 0) / 1e3 or time.time()
    code = "" if info.driver_exit_code is None else f", exit status {info.driver_exit_code}"
    print(f"{submission}: {info.status.value.lower()}{code}, {end - begin:.0f} s since it was submitted")
    return 0


def stop(client: JobSubmissionClient, submission: str) -> int:
    """Asks the job to stop, and waits until it has ended."""
    before = _info(client, submission).status
    if before.is_terminal():
        print(f"{submission}: had ended already: {before.value.lower()}")
        return 0
    client.stop_job(submission)
    give_up = time.monotonic() + STOP_SECONDS + LOST_SECONDS
    while not (status := _info(client, submission).status).is_terminal():
        if time.monotonic() > give_up:
            raise WorkError(f"{submission}: is still {status.value.lower()} after it was asked to stop")
        time.sleep(POLL_SECONDS)
    print(f"{submission}: {status.value.lower()}; submitting the same job resumes")
    return 0


def _info(client: JobSubmissionClient, submission: str) -> JobDetails:
    try:
        return client.get_job_info(submission)
    except RuntimeError as error:
        raise RequestError(f"{submission}: {_line(error)}") from error
    except (OSError, RayError) as error:
        raise WorkError(f"{submission}: the cluster does not answer: {_line(error)}") from error


def _line(error: object) -> str:
    return " ".join(str(error).split())[:300]


def _say(text: str, status: int) -> int:
    print(f"submit: {text}", file=sys.stderr, flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
