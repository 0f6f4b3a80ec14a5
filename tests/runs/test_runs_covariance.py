"""`statistics.covariance`: committed with every shard, merged at the end, read back, verified, refused where dear."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from covariancecase import FILE, assert_of_stored_rows, stored_rows
from runcase import WIDTH, job
from safetensors.numpy import load
from tiny import byte_tokenizer, tiny_llama

import harvest
from harvest.checking.repair import repair_run
from harvest.checking.verify import verify_run
from harvest.config import load_job
from harvest.errors import DamageError, RequestError
from harvest.plan import Plan, make_plan

TEXTS = ["".join(chr(97 + (i * k + k * k) % 26) for i in range(40 + 3 * k)) for k in range(24)]


def run(path: Path, texts: list[str] = TEXTS, shard: int = 8, **tables: Any) -> Any:
    asked = job(path, **{"statistics": {"covariance": True}, "store": {"shard_documents": shard}, **tables})
    return harvest.run(asked, model=tiny_llama(vocab=300), tokenizer=byte_tokenizer(), data=texts)


def planned(path: Path, shard: int, covariance: bool = True) -> Plan:
    asked = {"statistics": {"covariance": covariance}, "store": {"shard_documents": shard}}
    made = load_job(job(path / "run", model={"name": "given"}, data={"path": "given"}, **asked))
    return make_plan(made, model=tiny_llama(vocab=300), tokenizer=byte_tokenizer(), data=TEXTS)


def assert_that_of_the_rows(found: Any) -> None:
    statistics = found.statistics()
    assert list(statistics) == list(found.names)
    for name, known in statistics.items():
        rows = found[name].numpy(dtype="float32").astype(np.float64)
        expected = np.cov(rows.T, bias=True)
        assert known.covariance.shape == (WIDTH, WIDTH)
        assert np.abs(known.covariance - expected).max() <= 1e-10 * expected.max()
        np.testing.assert_allclose(np.diag(known.covariance), known.variance, rtol=1e-10)


def test_a_run_and_one_opened_again_have_the_covariance_of_their_rows_and_verify_is_content(tmp_path: Path) -> None:
    found = run(tmp_path / "run")
    assert len(found.shards) == 3
    assert_that_of_the_rows(found)
    assert_that_of_the_rows(harvest.open(tmp_path / "run"))
    assert not verify_run(str(tmp_path / "run")).findings
    whole = found.reduced("covariance")["residual.1"]
    assert whole.count == len(found)
    assert np.array_equal(whole.matrix, found.statistics()["residual.1"].covariance)


def test_whatever_the_batch_it_is_that_of_the_rows_read_by_plain_zarr_and_of_the_same_rows_it_has_the_same_bits(
    tmp_path: Path,
) -> None:
    """Embeddings are looked up: their rows have the same bits in any batch. Others differ by as much as is promised."""
    states, rows = [], []
    for batch in (1, 48, 4096):
        path = tmp_path / str(batch)
        run(path, tokens={"batch": batch}, capture={"sites": ["embedding", "residual"]})
        assert_of_stored_rows(path)
        states.append(load((path / FILE).read_bytes()))
        rows.append({name: stored_rows(path, name) for name in ("embedding", "residual.2")})
    for other, given in zip(states[1:], rows[1:]):
        assert np.array_equal(given["embedding"], rows[0]["embedding"])
        for field in ("rows", "mean", "upper"):
            key = f"covariance/embedding/{field}"
            assert other[key].tobytes() == states[0][key].tobytes()
        apart = np.abs(other["covariance/residual.2/upper"] - states[0]["covariance/residual.2/upper"]).max()
        assert apart <= 2 * 5e-5 * np.square(given["residual.2"]).sum()  # a row's error times a row, of all rows
    assert not np.array_equal(rows[0]["residual.2"], rows[2]["residual.2"])  # else batches were not put to the test


def test_whether_rows_are_stored_leaves_no_trace_and_a_second_run_changes_nothing(tmp_path: Path) -> None:
    run(tmp_path / "run", tokens={"batch": 1})
    run(tmp_path / "again", tokens={"batch": 1})
    run(tmp_path / "sums", tokens={"batch": 1}, capture={"store": False})
    first = (tmp_path / "run" / FILE).read_bytes()
    assert (tmp_path / "again" / FILE).read_bytes() == (tmp_path / "sums" / FILE).read_bytes() == first
    run(tmp_path / "run", tokens={"batch": 1})
    assert (tmp_path / "run" / FILE).read_bytes() == first


def test_an_unfinished_run_has_that_of_its_shards_and_several_runs_that_of_all(tmp_path: Path) -> None:
    run(tmp_path / "a")
    run(tmp_path / "b", [text[::-1] for text in TEXTS])
    assert_that_of_the_rows(harvest.open([tmp_path / "a", tmp_path / "b"]))
    (tmp_path / "a/complete.json").unlink()
    sorted((tmp_path / "a/ledger").iterdir())[1].unlink()
    assert_that_of_the_rows(harvest.open(tmp_path / "a"))


def test_without_being_asked_for_there_is_none(tmp_path: Path) -> None:
    found = run(tmp_path / "run", statistics={})
    assert found.statistics()["residual.0"].covariance is None
    assert not (tmp_path / "run" / FILE).exists()


def test_without_moments_it_is_read_as_a_reduction(tmp_path: Path) -> None:
    found = run(tmp_path / "run", statistics={"moments": False, "covariance": True}, capture={"store": False})
    assert found.reduced("covariance")["residual.0"].matrix.shape == (WIDTH, WIDTH)
    assert not verify_run(str(tmp_path / "run")).findings


@pytest.mark.parametrize("harm", ["missing", "flipped", "cut"])
def test_a_file_that_is_harmed_is_found_by_name_and_made_again_without_a_shard_being_harvested(
    harm: str, tmp_path: Path
) -> None:
    run(tmp_path / "run")
    path = tmp_path / "run" / FILE
    whole = path.read_bytes()
    if harm == "missing":
        path.unlink()
    else:
        path.write_bytes(whole[:-9] if harm == "cut" else whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    findings = [str(finding.object) for finding in verify_run(str(tmp_path / "run")).findings if finding.damage]
    assert findings == [FILE]
    if harm != "flipped":
        with pytest.raises(DamageError, match=r"covariance\.safetensors: cut short"):
            [known.covariance for known in harvest.open(tmp_path / "run").statistics().values()]
    assert not repair_run(str(tmp_path / "run")).harvested
    assert path.read_bytes() == whole


def test_sums_beyond_a_tenth_of_a_shards_rows_are_refused_with_the_shard_that_would_do(tmp_path: Path) -> None:
    said = r"^statistics\.covariance = true: its sums are [\d.]+ kB in every shard, whose rows are .*a tenth"
    with pytest.raises(RequestError, match=said) as refused:
        run(tmp_path / "run", shard=1)
    assert not (tmp_path / "run").exists()
    least = int(str(refused.value).partition("store.shard_documents = ")[2].split()[0])
    planned(tmp_path, least)
    with pytest.raises(RequestError, match="a tenth"):
        planned(tmp_path, least - 1)
    with pytest.raises(RequestError, match=r"^statistics\.also = 'covariance': its sums"):
        run(tmp_path / "run", shard=1, statistics={"also": ["covariance"]})


def test_the_plan_prices_the_sums_that_a_shard_then_holds(tmp_path: Path) -> None:
    found = run(tmp_path / "run")
    sizes = [path.stat().st_size for path in (tmp_path / "run").glob("shards/*/states.safetensors")]
    priced, bare = (planned(tmp_path, 8, covariance).estimate for covariance in (True, False))
    assert len(found.names) * WIDTH * (WIDTH + 1) * 4 < priced.state_bytes - bare.state_bytes
    assert max(abs(size - priced.state_bytes) for size in sizes) <= 0.25 * priced.state_bytes
    assert priced.memory_bytes > bare.memory_bytes
