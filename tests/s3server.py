"""A server that speaks S3 on loopback, with a bucket of its own for each user."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

KEYS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}


@dataclass(frozen=True, slots=True)
class S3Server:
    """Where it listens, and an empty bucket on it."""

    endpoint: str
    bucket: str

    @property
    def storage(self) -> dict[str, str]:
        """What `run.storage` says to reach it."""
        return {"endpoint": self.endpoint, "region": "us-east-1"}

    @property
    def environment(self) -> dict[str, str]:
        """What every S3 client reads to reach it."""
        return {**KEYS, "AWS_ENDPOINT_URL": self.endpoint, "AWS_DEFAULT_REGION": "us-east-1"}


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Skips the test where the extras `s3` and `test` are not installed; credentials are in the environment alone.

    Servers of one process share what they hold, hence the name at random; connections that fsspec kept lead to the
    server of another test, hence the clearing.
    """
    s3fs = pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in KEYS.items():
                patch.setenv(name, value)
            for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL"):
                patch.delenv(name, raising=False)
            host, port = server.get_host_and_port()
            found = S3Server(endpoint=f"http://{host}:{port}", bucket=f"test-{secrets.token_hex(4)}")
            s3fs.S3FileSystem(endpoint_url=found.endpoint).call_s3("create_bucket", Bucket=found.bucket)
            yield found
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
        server.stop()
