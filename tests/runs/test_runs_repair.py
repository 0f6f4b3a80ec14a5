"""Whatever was done to a run, `verify --repair` ends with a clean run's bits, harvests the damaged shards alone, and
leaves a run as it was that it cannot mend."""

from __future__ import annotations

import contextlib
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import pytest
from commandcase import jsonl
from plainrun import PlainRun, attempts_without_record, files_below, first_difference, read_plain, snapshot
from runcase import Died, Failing, bury, job
from tiny import byte_tokenizer, tiny_llama

import harvest
from harvest.__main__ import _status
from harvest.checking.repair import Repair, repair_run
from harvest.checking.verify import verify_run
from harvest.errors import DamageError, HarvestError, MismatchError, RequestError
from harvest.runtime import coordinate
from harvest.store.lease import Lease
from harvest.store.opening import open_files

TEXTS = ["abc", "", "a much longer text than the others", "d", "ee ee ee", "", "xyz" * 9, "k", "last one", "and", "on"]
KEY = "f00000-s000001"
"""The shard that gets damaged, of four."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, texts, a job and its clean run."""
    folder = tmp_path_factory.mktemp("made")
    tiny_llama(layers=2, vocab=300).save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    jsonl(folder / "texts.jsonl", [{"text": text, "label": str(i)} for i, text in enumerate(TEXTS)])
    harvest.run(settings(folder, folder / "clean"))
    return folder


def settings(folder: Path, path: Path, **tables: Any) -> dict[str, Any]:
    """The job of all tests here; the limit is one that no shard meets."""
    return job(
        path,
        **{
            "model": {"name": str(folder / "model")},
            "data": {"path": str(folder / "texts.jsonl"), "keep": ["label"], "limit": 50},
            "store": {"shard_documents": 3},
            "tokens": {"context": 16, "batch": 48},
            "capture": {"sites": ["residual", "mlp.1"], "layers": [1], "pool": ["mean"]},
            **tables,
        },
    )


@pytest.fixture
def path(made: Path, tmp_path: Path) -> Path:
    """A copy of the clean run, to be damaged."""
    shutil.copytree(made / "clean", tmp_path / "run")
    return tmp_path / "run"


def attempt(path: Path, key: str = KEY) -> Path:
    return path / "shards" / str(json.loads((path / f"ledger/{key}.json").read_text())["attempt"])


def told(path: Path) -> dict[str, Any]:
    """complete.json but for what a life leaves in it."""
    found: dict[str, Any] = json.loads((path / "complete.json").read_text())
    return {key: value for key, value in found.items() if key not in ("seconds", "self_check")}


def lasting(path: Path) -> list[str]:
    """The files of a run but for what a local store writes beside them."""
    return [file for file in files_below(path) if not file.endswith((".tmp", ".lock"))]


def check_mended(path: Path, made: Path) -> None:
    """Every byte of the run is the clean one's but for names of lives and times."""
    assert first_difference(read_plain(made / "clean"), read_plain(path)) is None
    assert told(path) == told(made / "clean")
    assert attempts_without_record(path) == []
    assert verify_run(path).findings == ()

    assert len(lasting(path)) == len(lasting(made / "clean")), "nothing is left over"
    assert harvest.open(path).complete


def flip(path: Path, at: int = 9) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def lose_chunk(path: Path) -> None:
    """The chunk index says, with a sound checksum, that the only chunk was never written."""
    data = path.read_bytes()
    index = struct.pack("<QQ", 2**64 - 1, 2**64 - 1)
    path.write_bytes(data[:-20] + index + struct.pack("<I", google_crc32c.value(index)))


def swap_records(path: Path) -> None:
    (path / f"ledger/{KEY}.json").write_bytes((path / "ledger/f00000-s000002.json").read_bytes())


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


OF_THE_SHARD: dict[str, Callable[[Path], Any]] = {
    "array missing": lambda run: (attempt(run) / "residual.1/c.0.0").unlink(),
    "array short": lambda run: (attempt(run) / "mlp.1/c.0.0").write_bytes(b"short"),
    "array of zero length": lambda run: (attempt(run) / "mlp.1/c.0.0").write_bytes(b""),
    "array too long": lambda run: (attempt(run) / "mlp.1/c.0.0").open("ab").write(b"more"),
    "another shard's array": lambda run: shutil.copy(
        attempt(run, "f00000-s000002") / "mlp.1/c.0.0", attempt(run) / "mlp.1/c.0.0"
    ),
    "bit in an array": lambda run: flip(attempt(run) / "residual.1/c.0.0"),
    "bit in a pooled array": lambda run: flip(attempt(run) / "pooled/mean/residual.1/c.0.0"),
    "bit in the metadata": lambda run: flip(attempt(run) / "residual.1/zarr.json"),
    "bit in the tokens": lambda run: flip(attempt(run) / "tokens.parquet", 60),
    "bit in the documents": lambda run: flip(attempt(run) / "documents.parquet", 60),
    "bit in the sums": lambda run: flip(attempt(run) / "states.safetensors", -9),
    "sums missing": lambda run: (attempt(run) / "states.safetensors").unlink(),
    "chunk deleted": lambda run: lose_chunk(attempt(run) / "residual.1/c.0.0"),
    "folder of an array gone": lambda run: shutil.rmtree(attempt(run) / "residual.1"),
    "attempt gone": lambda run: shutil.rmtree(attempt(run)),
    "record missing": lambda run: (run / f"ledger/{KEY}.json").unlink(),
    "record torn": lambda run: (run / f"ledger/{KEY}.json").write_bytes(
        (run / f"ledger/{KEY}.json").read_bytes()[:200]
    ),
    "record of zero length": lambda run: (run / f"ledger/{KEY}.json").write_bytes(b""),
    "bit in the record": lambda run: change(run / f"ledger/{KEY}.json", '"documents": 3', '"documents": 2'),
    "another shard's record": swap_records,
}
OF_THE_RUN: dict[str, Callable[[Path], Any]] = {
    "statistics missing": lambda run: (run / "statistics.parquet").unlink(),
    "bit in the statistics": lambda run: flip(run / "statistics.parquet", 80),
    "totals changed": lambda run: change(run / "complete.json", '"documents": 11', '"documents": 12'),
    "totals torn": lambda run: (run / "complete.json").write_text('{"format": 1, '),
    "totals of zero length": lambda run: (run / "complete.json").write_text(""),
}


@pytest.mark.parametrize("kind", OF_THE_SHARD)
def test_a_damaged_shard_and_no_other_is_harvested_again_with_the_clean_bits(kind: str, path: Path, made: Path) -> None:
    others = {key: attempt(path, key) for key in ("f00000-s000000", "f00000-s000002", "f00000-s000003")}
    before = {key: snapshot(folder) for key, folder in others.items()}
    OF_THE_SHARD[kind](path)
    assert verify_run(path).damaged
    repair = repair_run(path)
    assert repair.harvested == (KEY,)
    assert not repair.after.damaged
    check_mended(path, made)
    assert {key: snapshot(folder) for key, folder in others.items()} == before, "sound shards are not touched"


@pytest.mark.parametrize("kind", OF_THE_RUN)
def test_merged_files_are_written_anew_and_no_shard_is_harvested(kind: str, path: Path, made: Path) -> None:
    before = snapshot(path / "shards")
    OF_THE_RUN[kind](path)
    assert verify_run(path).damaged
    assert repair_run(path).harvested == ()
    assert told(path) == told(made / "clean")
    check_mended(path, made)
    assert snapshot(path / "shards") == before


def test_several_kinds_of_damage_are_mended_in_one_go(path: Path, made: Path) -> None:
    flip(attempt(path, "f00000-s000003") / "mlp.1/c.0.0")
    (path / "ledger/f00000-s000000.json").write_text("{")
    (path / "complete.json").unlink()
    (path / "statistics.parquet").write_bytes(b"PAR1")
    assert repair_run(path).harvested == ("f00000-s000000", "f00000-s000003")
    check_mended(path, made)


def test_what_only_a_run_writes_and_no_record_vouches_for_is_removed_and_the_rest_is_not(
    path: Path, made: Path
) -> None:
    stray = path / "shards" / f"{KEY}.0123abcd-7"
    (stray / "mlp.1").mkdir(parents=True)
    (stray / "mlp.1/c.0.0").write_bytes(b"half")
    (attempt(path) / "mlp.1/c.5.0").write_bytes(b"left over")
    repair = repair_run(path)
    assert sorted(repair.removed) == sorted(
        [f"shards/{stray.name}", str((attempt(path) / "mlp.1/c.5.0").relative_to(path))]
    )
    check_mended(path, made)
    (attempt(path) / "notes.txt").write_text("mine")
    (path / "notes.txt").write_text("mine")
    flip(attempt(path) / "mlp.1/c.0.0")
    repair_run(path)
    assert len([file for file in files_below(path) if file.endswith("notes.txt")]) == 2


def test_a_sound_run_is_only_read(path: Path) -> None:
    before = snapshot(path)
    repair = repair_run(path)
    assert (repair.harvested, repair.removed, repair.after) == ((), (), repair.before)
    assert snapshot(path) == before


def test_a_run_that_was_moved_is_mended_where_it_is(path: Path, made: Path, tmp_path: Path) -> None:
    moved = path.rename(tmp_path / "elsewhere")
    change_run_path = json.loads((moved / "run.json").read_text())["job"]["run"]["path"]
    assert change_run_path == str(made / "clean")
    before = snapshot(made / "clean")
    flip(attempt(moved) / "mlp.1/c.0.0")
    repair_run(moved)
    check_mended(moved, made)
    assert snapshot(made / "clean") == before


def test_an_unfinished_run_gets_what_is_damaged_and_what_is_missing(path: Path, made: Path) -> None:
    (path / "complete.json").unlink()
    shutil.rmtree(attempt(path, "f00000-s000003"))
    (path / "ledger/f00000-s000003.json").unlink()
    flip(attempt(path) / "tokens.parquet", 50)
    assert repair_run(path).harvested == (KEY, "f00000-s000003")
    check_mended(path, made)


# ---- killed --------------------------------------------------------------------------------------------------------


def killed(path: Path, at: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """A repair that dies at an operation of the store; whether it got that far."""
    counted: list[Failing] = []

    def wrapped(*args: Any, **more: Any) -> Any:
        done = sum(len(files.log) for files in counted)
        counted.append(Failing(open_files(*args, **more), at - done if at >= done else None))
        return counted[-1]

    with monkeypatch.context() as patch:
        patch.setattr("harvest.checking.repair.open_files", wrapped)
        patch.setattr(coordinate, "open_files", wrapped)
        with contextlib.suppress(Died, OSError, HarvestError):
            repair_run(path)
    bury(path)
    return any(files.dead for files in counted)


@pytest.mark.parametrize("again", ["run", "repair"])
def test_a_repair_killed_at_any_operation_goes_on_with_the_next_run_or_repair(
    again: str, path: Path, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(attempt(path) / "mlp.1/c.0.0")
    (path / "statistics.parquet").unlink()
    at, reached = (0 if again == "run" else 1), True
    while reached:
        copy = tmp_path / f"killed-{at}"
        shutil.copytree(path, copy)
        reached = killed(copy, at, monkeypatch)
        if again == "run" and not verify_run(copy).damaged:
            harvest.run(settings(made, copy))
        else:  # killed before it had un-committed anything: the damage still stands
            repair_run(copy)
        check_mended(copy, made)
        at += 8
    assert at > 50, "the walk went over un-committing, every write of the shard, its commit and the merge"


# ---- refused -------------------------------------------------------------------------------------------------------


def refuses(path: Path, error: type[HarvestError], *names: str, **more: Any) -> None:
    """One line that names these, and nothing has changed."""
    before = snapshot(path)
    with pytest.raises(error) as caught:
        repair_run(path, **more)
    assert "\n" not in str(caught.value)
    for name in names:
        assert name in str(caught.value), str(caught.value)
    assert snapshot(path) == before


def long_texts(path: Path) -> Path:
    """A file so large that its fingerprint does not see its middle."""
    return jsonl(path, [{"text": f"{i} " + "word " * 20_000, "label": ""} for i in range(12)])


def test_rows_that_have_changed_are_told_by_file_and_shard_and_nothing_is_done(made: Path, tmp_path: Path) -> None:
    source, run = long_texts(tmp_path / "texts.jsonl"), tmp_path / "run"
    data = {"path": str(source), "keep": ["label"]}
    more = {"tokens": {"context": 16, "long": "truncate"}, "data": data}
    harvest.run(settings(made, run, **more))
    clean = read_plain(run)
    flip(attempt(run) / "mlp.1/c.0.0")
    whole = source.read_bytes()
    at = whole.index(b"4 word") + 50_000
    source.write_bytes(whole[:at] + b"W" + whole[at + 1 :])
    refuses(run, MismatchError, f"shard {KEY}", "texts.jsonl", "rows 3 to 6", "nothing was changed")
    at = whole.index(b"8 word") + 50_000  # of the next shard, which nobody needs to read
    source.write_bytes(whole[:at] + b"W" + whole[at + 1 :])
    assert repair_run(run).harvested == (KEY,)
    assert first_difference(clean, read_plain(run)) is None


def test_a_file_that_is_another_or_gone_is_refused(made: Path, tmp_path: Path) -> None:
    source, run = jsonl(tmp_path / "texts.jsonl", [{"text": text, "label": ""} for text in TEXTS]), tmp_path / "run"
    harvest.run(settings(made, run, data={"path": str(source)}))
    flip(attempt(run) / "mlp.1/c.0.0")
    source.write_text(source.read_text() + '{"text": "one more"}\n')
    refuses(run, RequestError, "data file texts.jsonl", "cannot be harvested again as it was")
    source.unlink()
    refuses(run, RequestError, "data.path")


def test_a_run_of_the_callers_own_objects_is_refused_with_the_way_out_which_works(tmp_path: Path) -> None:
    given: dict[str, Any] = {"model": tiny_llama(layers=2, vocab=300), "tokenizer": byte_tokenizer(), "data": TEXTS}
    small = {"store": {"shard_documents": 3}, "capture": {"layers": [1]}}
    harvest.run(job(tmp_path / "run", **small), **given)
    clean = read_plain(tmp_path / "run")
    flip(attempt(tmp_path / "run") / "residual.1/c.0.0")
    refuses(tmp_path / "run", RequestError, "model and data of the caller's own", "repair_run(", "model=...")
    other = {**given, "model": tiny_llama(layers=2, vocab=300, seed=1)}
    refuses(tmp_path / "run", RequestError, "content of the model", **other)
    refuses(tmp_path / "run", MismatchError, f"shard {KEY}", **{**given, "data": [text.upper() for text in TEXTS]})
    assert repair_run(tmp_path / "run", **given).harvested == (KEY,)
    assert first_difference(clean, read_plain(tmp_path / "run")) is None


def test_merged_files_of_a_run_of_objects_need_no_objects(tmp_path: Path) -> None:
    harvest.run(job(tmp_path / "run"), model=tiny_llama(layers=2, vocab=300), tokenizer=byte_tokenizer(), data=TEXTS)
    whole = (tmp_path / "run/statistics.parquet").read_bytes()
    (tmp_path / "run/statistics.parquet").unlink()
    (tmp_path / "run/complete.json").write_text("")
    assert not repair_run(tmp_path / "run").after.damaged
    assert (tmp_path / "run/statistics.parquet").read_bytes() == whole


def test_a_run_that_someone_works_on_and_a_ledger_with_a_strangers_file_are_refused(path: Path) -> None:
    flip(attempt(path) / "mlp.1/c.0.0")
    with Lease.acquire(open_files(str(path))):
        refuses(path, RequestError, "is at work on this run")
    (path / "ledger/notes.txt").write_text("mine")
    refuses(path, DamageError, "ledger/notes.txt", "move it elsewhere")


def test_limits_that_cut_a_shard_are_kept(made: Path, tmp_path: Path) -> None:
    for name, data in (("limit", {"limit": 5}), ("tokens", {"max_tokens": 45})):
        run = tmp_path / name
        harvest.run(settings(made, run, data={"path": str(made / "texts.jsonl"), **data}))
        clean: PlainRun = read_plain(run)
        assert clean.records[KEY]["cut"]
        flip(attempt(run) / "mlp.1/c.0.0")
        assert repair_run(run).harvested == (KEY,)
        assert first_difference(clean, read_plain(run)) is None


# ---- the command ---------------------------------------------------------------------------------------------------


def test_the_command_says_what_it_found_and_did_and_ends_with_0(
    path: Path, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(attempt(path) / "mlp.1/c.0.0")
    assert _status(["verify", str(path)]) == 1
    capsys.readouterr()
    assert _status(["verify", str(path), "--repair"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("damage: shards/")
    assert f"harvested again: {KEY}" in out
    assert out[-1].endswith("everything is as it was")
    assert _status(["verify", str(path), "--repair", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["damaged"] is False
    check_mended(path, made)


def test_what_a_repair_says_is_plain_data(path: Path) -> None:
    (path / "statistics.parquet").unlink()
    repair: Repair = repair_run(path)
    assert json.loads(json.dumps(repair.data))["before"]["damaged"] is True
    assert repair.data["after"]["damaged"] is False


def test_a_run_in_memory_is_mended_like_one_on_disk() -> None:
    given: dict[str, Any] = {"model": tiny_llama(layers=2, vocab=300), "tokenizer": byte_tokenizer(), "data": TEXTS}
    path = "memory://repair/run"
    run = harvest.run(job(path, store={"shard_documents": 3}), **given)  # type: ignore[arg-type]
    rows, attempt_path = run["residual.1"][:], f"shards/{run.shards[1].attempt}/residual.1/c.0.0"
    files = open_files(path)
    files.replace(attempt_path, files.read(attempt_path)[:-1])
    assert verify_run(path).damaged
    assert repair_run(path, **given).harvested == (KEY,)
    assert verify_run(path).findings == ()
    assert harvest.open(path)["residual.1"][:].equal(rows)
