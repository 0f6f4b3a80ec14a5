"""Promise 4: merge(update(a), update(b)) = update(a + b), in any order and grouping; numpy in float64 is the judge."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harvest.errors import DamageError
from harvest.reduce.base import Block, StateFile, load_states, save_states
from harvest.reduce.health import Health, HealthState
from harvest.reduce.moments import Moments, MomentsState, NameStatistics, RowStatistics

MOMENTS, HEALTH = Moments(), Health()


def block(rows: torch.Tensor, special: np.ndarray | None = None) -> Block:
    n = len(rows)
    flags = np.zeros(n, bool) if special is None else special
    return Block(rows=rows, special=flags, document=np.zeros(n, np.int64), position=np.arange(n, dtype=np.int32))


def summed(*blocks: Block) -> MomentsState:
    state = MOMENTS.zero()
    for part in blocks:
        state = MOMENTS.update(state, part)
    return state


def assert_matches_numpy(found: RowStatistics, rows: np.ndarray, rtol: float = 1e-11) -> None:
    """Against numpy over all rows in one piece, in float64; rows with a non-finite value are left out."""
    rows = rows.astype(np.float64)
    good = rows[np.isfinite(rows).all(axis=1)]
    norms = np.sqrt((good**2).sum(axis=1))
    scale = np.abs(good).max(initial=0)
    assert (found.count, found.non_finite_rows) == (len(good), len(rows) - len(good))
    assert (found.non_finite, found.zero_rows) == ((~np.isfinite(rows)).sum(), (good == 0).all(axis=1).sum())
    if not len(good):
        assert np.isnan([found.mean_norm, found.mean_squared_norm, found.norm_min, found.min]).all()
        return
    np.testing.assert_allclose(found.mean, good.mean(axis=0), rtol=rtol, atol=1e-15 * scale)
    np.testing.assert_allclose(found.variance, good.var(axis=0), rtol=rtol, atol=1e-30 * scale**2)
    np.testing.assert_allclose(found.mean_norm, norms.mean(), rtol=rtol)
    np.testing.assert_allclose(found.mean_squared_norm, (norms**2).mean(), rtol=rtol)
    np.testing.assert_allclose([found.norm_min, found.norm_max], [norms.min(), norms.max()], rtol=rtol)
    assert (found.min, found.max) == (good.min(), good.max())
    for share, value in found.norm_quantiles.items():
        np.testing.assert_allclose(value, np.quantile(norms, share, method="inverted_cdf"), rtol=0.01)


def assert_close(one: NameStatistics, two: NameStatistics) -> None:
    for a, b in ((one, two), (one.ordinary, two.ordinary)):
        for field in RowStatistics.__dataclass_fields__:
            x, y = getattr(a, field), getattr(b, field)
            if field == "norm_quantiles":
                assert x.keys() == y.keys()
                x, y = list(x.values()), list(y.values())
            np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12, err_msg=field)


def bits(state: MomentsState) -> dict[str, tuple[bytes, tuple[int, ...]]]:
    return {key: (array.tobytes(), array.shape) for key, array in MOMENTS.arrays(state).items()}


VALUES = st.sampled_from([0.0, 1.0, -1.0, 3.5, 1e-3, 1000.0, 1000.5, -3000.0, 7.0, float("nan"), float("inf")])


@settings(max_examples=150, deadline=None)
@given(data=st.data(), width=st.integers(1, 5), n=st.integers(0, 24))
def test_any_partition_merged_in_any_order_and_grouping_matches_the_whole(
    data: st.DataObject, width: int, n: int
) -> None:
    rows = np.array(data.draw(st.lists(VALUES, min_size=n * width, max_size=n * width)), np.float32).reshape(n, width)
    special = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)), bool)
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=5)))
    tensor = torch.from_numpy(rows)
    parts = [summed(block(tensor[a:b], special[a:b])) for a, b in zip([0, *cuts], [*cuts, n])]
    parts = data.draw(st.permutations(parts))
    while len(parts) > 1:
        at = data.draw(st.integers(0, len(parts) - 2))
        parts[at : at + 2] = [MOMENTS.merge(parts[at], parts[at + 1])]
    found = MOMENTS.finalise(parts[0])
    assert_close(found, MOMENTS.finalise(summed(block(tensor, special))))
    assert_matches_numpy(found, rows, 1e-9)
    assert_matches_numpy(found.ordinary, rows[~special], 1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_dtype_matches_numpy_on_the_exact_values_it_stores(dtype: torch.dtype) -> None:
    rows = (torch.randn(3000, 48, generator=torch.Generator().manual_seed(1)) * 3 + 5).to(dtype)
    special = np.zeros(3000, bool)
    special[::100] = True
    found = MOMENTS.finalise(summed(block(rows[:1700], special[:1700]), block(rows[1700:], special[1700:])))
    exact = rows.double().numpy()
    assert_matches_numpy(found.all, exact)
    assert_matches_numpy(found.ordinary, exact[~special])


@pytest.mark.parametrize(("width", "rows"), [(3, 70_000), (576, 9_000), (20_000, 130)])
def test_inputs_of_many_cache_blocks_match_numpy(width: int, rows: int) -> None:
    values = torch.randn(rows, width, generator=torch.Generator().manual_seed(2)) + 2
    assert_matches_numpy(MOMENTS.finalise(summed(block(values))), values.numpy())


def test_a_large_offset_costs_the_variance_no_digits() -> None:
    """A mean of 1,000 with two dimensions at 3,000 over many blocks: 1e-9 of what float64 says of the centred rows."""
    generator = np.random.default_rng(3)
    offset = np.full(16, 1000.0)
    offset[[2, 9]] = 3000.0
    state, deviations = MOMENTS.zero(), []
    for _ in range(50):
        rows = (generator.normal(0, 0.1, (4000, 16)) + offset).astype(np.float32)
        deviations.append(rows.astype(np.float64) - offset)
        state = MOMENTS.update(state, block(torch.from_numpy(rows)))
    found, whole = MOMENTS.finalise(state), np.concatenate(deviations)
    np.testing.assert_allclose(found.mean, offset + whole.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(found.variance, whole.var(axis=0), rtol=1e-9)


def test_values_whose_squares_overflow_or_vanish_in_float32_keep_their_norms() -> None:
    rows = torch.tensor([[3e38, 3e38], [1e-30, 0.0], [1e-45, 1e-45], [0.0, 0.0]])
    found = MOMENTS.finalise(summed(block(rows)))
    exact = np.sqrt((rows.double().numpy() ** 2).sum(axis=1))
    assert (found.count, found.zero_rows, found.non_finite) == (4, 1, 0)
    np.testing.assert_allclose([found.norm_min, found.norm_max, found.mean_norm], [0, exact[0], exact.mean()])


def test_zero_is_the_identity_bit_for_bit_from_both_sides() -> None:
    zero = MOMENTS.zero()
    bad = torch.tensor([[float("nan"), 1.0]])
    for state in (zero, summed(block(torch.randn(5, 3), np.array([1, 0, 0, 1, 0], bool))), summed(block(bad))):
        assert bits(MOMENTS.merge(zero, state)) == bits(state) == bits(MOMENTS.merge(state, zero))
    assert bits(MOMENTS.update(zero, block(torch.zeros(0, 3)))) == bits(zero)


def test_the_same_order_gives_the_same_bits_and_leaves_its_arguments_alone() -> None:
    first, second = summed(block(torch.randn(900, 64))), summed(block(torch.randn(700, 64)))
    before = bits(first), bits(second)
    assert bits(MOMENTS.merge(first, second)) == bits(MOMENTS.merge(first, second))
    rows = torch.randn(100, 64)
    assert bits(MOMENTS.update(first, block(rows))) == bits(MOMENTS.merge(first, summed(block(rows))))
    assert before == (bits(first), bits(second))


def test_one_nan_row_is_counted_and_the_other_99_are_averaged() -> None:
    rows = np.random.default_rng(4).normal(size=(100, 4)).astype(np.float32)
    rows[7, 2] = np.nan
    tensor = torch.from_numpy(rows)
    found = MOMENTS.finalise(MOMENTS.merge(summed(block(tensor[:50])), summed(block(tensor[50:]))))
    assert (found.count, found.non_finite, found.non_finite_rows) == (99, 1, 1)
    np.testing.assert_allclose(found.mean, np.delete(rows, 7, axis=0).astype(np.float64).mean(axis=0), rtol=1e-12)


def test_massive_first_tokens_show_in_quantiles_and_are_absent_from_the_ordinary_mean() -> None:
    rows = torch.randn(8 * 40, 16, generator=torch.Generator().manual_seed(5))
    rows[::8, 3] = 500.0
    special = np.zeros(len(rows), bool)
    special[::8] = True
    found = MOMENTS.finalise(summed(block(rows, special)))
    assert found.norm_quantiles[0.5] < 10 < 490 < found.norm_quantiles[0.95]
    assert found.high_norm_share == 1 / 8
    assert found.ordinary.high_norm_share == 0
    assert_matches_numpy(found.ordinary, rows.numpy()[~special])


def test_variance_is_pooled_over_batches_not_averaged() -> None:
    parts = [torch.full((4, 1), 0.0), torch.full((4, 1), 10.0), torch.full((1, 1), 4.0)]
    found = MOMENTS.finalise(summed(*map(block, parts)))
    np.testing.assert_allclose(found.variance, torch.cat(parts).numpy().astype(np.float64).var(axis=0), rtol=1e-14)


def test_rows_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match="width 3 and 4"):
        MOMENTS.merge(summed(block(torch.ones(1, 3))), summed(block(torch.ones(1, 4))))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(VALUES, min_size=3, max_size=3), max_size=12), st.integers(0, 12))
def test_health_counts_what_numpy_counts_however_the_rows_are_split(values: list[list[float]], cut: int) -> None:
    rows = np.array(values, np.float32).reshape(-1, 3)
    tensor = torch.from_numpy(rows)
    state = HEALTH.update(HEALTH.update(HEALTH.zero(), block(tensor[:cut])), block(tensor[cut:]))
    bad = ~np.isfinite(rows)
    assert state == HealthState(
        rows=len(rows),
        non_finite_values=int(bad.sum()),
        non_finite_rows=int(bad.any(axis=1).sum()),
        zero_rows=int((rows == 0).all(axis=1).sum()),
    )


def test_health_is_not_fooled_by_norms_that_overflow_or_vanish() -> None:
    rows = torch.tensor([[3e38, 3e38], [1e-45, 0.0]])
    for dtype in (torch.float32, torch.bfloat16):
        state = HEALTH.update(HEALTH.zero(), block(rows.to(dtype)))
        zeros = int((rows.to(dtype) == 0).all(dim=1).sum())
        assert state == HealthState(rows=2, zero_rows=zeros)


def test_saved_states_come_back_bit_for_bit_by_name() -> None:
    names = {"residual.3": summed(block(torch.randn(9, 4))), "pooled/mean/residual.3": MOMENTS.zero()}
    blob = save_states([(MOMENTS, names), (HEALTH, {"residual.3": HealthState(rows=9)})])
    loaded = dict(load_states(MOMENTS, blob))
    assert {name: bits(state) for name, state in loaded.items()} == {name: bits(s) for name, s in names.items()}
    assert dict(load_states(HEALTH, blob)) == {"residual.3": HealthState(rows=9)}
    assert blob == save_states([(MOMENTS, names), (HEALTH, {"residual.3": HealthState(rows=9)})])


def test_loading_one_name_reads_only_its_arrays() -> None:
    blob = save_states([(MOMENTS, {f"n.{i}": summed(block(torch.randn(4, 512))) for i in range(8)})])
    read: list[int] = []
    file = StateFile(lambda start, length: (read.append(length), blob[start : start + length])[1], "s")
    header = sum(read)
    assert file.load(MOMENTS, "n.5").ordinary.rows == 4
    assert sum(read) - header < (len(blob) - header) / 4


def test_a_cut_or_foreign_or_newer_state_file_is_damage_by_name() -> None:
    blob = save_states([(HEALTH, {"a": HealthState(rows=1)})])
    for broken in (b"", blob[:20], blob[:-4], b"\xff" * 40):
        with pytest.raises(DamageError, match="somewhere"):
            list(load_states(HEALTH, broken, "somewhere"))
    for key in (b'"data_offsets"', b'"dtype"', b'"shape"', b'"I64"'):
        flipped = blob.replace(key, key[:-2] + b"~" + key[-1:])
        assert flipped != blob, key
        with pytest.raises(DamageError, match="somewhere"):
            list(load_states(HEALTH, flipped, "somewhere"))
    newer = Health()
    newer.version = 2
    with pytest.raises(DamageError, match="version 1; this program reads 2"):
        list(load_states(newer, blob))
