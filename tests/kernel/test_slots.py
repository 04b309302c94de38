"""Slots: which tokens write a cache row, and which row."""

import itertools

import pytest
import torch
from kernel import oracle
from kernel.calls import Call, make
from kernel.checks import check, compare, expected, run
from kernel.devices import KernelDevice
from kernel.memory import Guarded

from mlaprep.clients.reference import destination_rows, prepare_chain, write_rows

LOC_DTYPES = pytest.mark.parametrize("loc_dtype", [torch.int32, torch.int64])
INT64 = torch.iinfo(torch.int64)
INT32 = torch.iinfo(torch.int32)


def written_rows(call: Call) -> set[int]:
    """Rows of the pool that the oracle changes; sources are never all poison."""
    result = expected(call)
    assert call.pool is not None
    assert result.pool is not None
    rows = call.pool.inside(result.pool)
    return {row for row in range(rows.shape[0]) if (rows[row] != call.pool.poison).any()}


@LOC_DTYPES
@pytest.mark.parametrize(
    ("loc", "world", "rank", "written"),
    [
        ([-1, 5, -4, 7], 1, 0, {5, 7}),
        ([-4, -8], 4, 0, set()),
        ([-1], 4, 3, set()),
        ([-1, -2, -3, -4, 0, 1], 2, 1, {0}),
    ],
)
def test_B004_negative_slots_write_nothing_and_build_their_query(
    device: KernelDevice, loc: list[int], world: int, rank: int, written: set[int], loc_dtype: torch.dtype
) -> None:
    call = make(len(loc), loc=loc, loc_dtype=loc_dtype, dcp_world=world, dcp_rank=rank)
    assert written_rows(call) == written
    check(call, device)


def test_B005_slots_beyond_the_capacity_are_skipped_and_never_narrowed(device: KernelDevice) -> None:
    rows = 24
    loc = [rows - 1, rows, 2**31, 2**40 + 17, 2**32 + 3, INT64.max, INT64.min]
    call = make(len(loc), rows=rows, loc=loc)
    assert written_rows(call) == {rows - 1}
    check(call, device)


def test_B005_int32_slots_at_their_limits(device: KernelDevice) -> None:
    call = make(4, rows=24, loc=[23, 24, INT32.max, INT32.min], loc_dtype=torch.int32)
    assert written_rows(call) == {23}
    check(call, device)


@pytest.mark.parametrize("rows", [0, 1])
def test_B005_a_pool_of_no_row_or_one(device: KernelDevice, rows: int) -> None:
    check(make(3, rows=rows, loc=[1, 0, -1]), device)


@LOC_DTYPES
@pytest.mark.parametrize("reserved", [None, 0, 3, -1, INT64.max, INT64.min])
def test_B006_only_an_explicit_reserved_slot_is_skipped(
    device: KernelDevice, reserved: int | None, loc_dtype: torch.dtype
) -> None:
    call = make(3, loc=[0, 5, 3], loc_dtype=loc_dtype, reserved_slot=reserved)
    nan = call.k_nope.clone()
    nan[0] = float("nan")
    call = Call(**{**vars(call), "k_nope": nan})
    assert written_rows(call) == {0, 3, 5} - {reserved}
    check(call, device)


def test_B006_padding_that_shares_the_reserved_slot_never_reaches_the_pool(device: KernelDevice) -> None:
    call = make(3, loc=[0, 0, 3], reserved_slot=0)
    nan = call.k_nope.clone()
    nan[:2] = float("nan")
    call = Call(**{**vars(call), "k_nope": nan})
    assert written_rows(call) == {3}
    check(call, device)


def test_B006_the_reserved_slot_is_the_slot_not_the_local_row(device: KernelDevice) -> None:
    """Slots 1 to W-1 are row 0 of the other ranks: reserving slot 0 leaves them alone."""
    for rank in range(4):
        call = make(4, loc=[0, 1, 2, 3], reserved_slot=0, dcp_world=4, dcp_rank=rank)
        assert written_rows(call) == ({0} if rank else set())
        check(call, device)


@pytest.mark.parametrize(("world", "interleave"), list(itertools.product([2, 3, 4, 8], [1, 3, 64])))
def test_B012_ranks_together_write_each_slot_once(device: KernelDevice, world: int, interleave: int) -> None:
    tokens, rank_dim = 1024, 16
    slots = torch.randperm(tokens, generator=torch.Generator().manual_seed(world * interleave)).tolist()
    local_rows = -(-tokens // (world * interleave)) * interleave
    whole = make(tokens, heads=1, rank=rank_dim, rope_dim=0, rows=tokens, loc=slots)
    unsharded = expected(whole)
    assert whole.pool is not None
    assert unsharded.pool is not None
    union = torch.zeros(tokens, rank_dim, dtype=torch.uint8)
    times = torch.zeros(tokens, dtype=torch.int64)
    for rank in range(world):
        pool = Guarded.pool(local_rows, rank_dim)
        sharded = {"pool": pool, "dcp_world": world, "dcp_rank": rank, "dcp_interleave": interleave}
        call = Call(**{**vars(whole), **sharded})
        result = check(call, device)
        assert torch.equal(result.query, unsharded.query)
        for slot in range(tokens):
            row = oracle.cache_row(slot, local_rows, None, world, rank, interleave)
            if row is not None:
                times[slot] += 1
                union[slot] = pool.inside(result.pool)[row]
    assert (times == 1).all()
    assert torch.equal(union, whole.pool.inside(unsharded.pool))


@pytest.mark.parametrize(("interleave", "rows"), [(1, 300), (64, 64)])
def test_B012_the_largest_world_and_slots_far_out(device: KernelDevice, interleave: int, rows: int) -> None:
    world = 1024
    loc = [0, world * interleave - 1, world * interleave, 2**31 - 1, 2**31, 2**40 + 17, INT64.max, -1, 65_537]
    for rank in (0, 1, world - 1):
        check(make(9, rows=rows, loc=loc, dcp_world=world, dcp_rank=rank, dcp_interleave=interleave), device)


@pytest.mark.parametrize(
    ("rules", "error", "name"),
    [
        ({"dcp_world": 4, "dcp_rank": 4}, ValueError, "dcp_rank"),
        ({"dcp_world": 4, "dcp_rank": -1}, ValueError, "dcp_rank"),
        ({"dcp_rank": 1}, ValueError, "dcp_rank"),
        ({"dcp_world": 0}, ValueError, "dcp_world"),
        ({"dcp_world": -2}, ValueError, "dcp_world"),
        ({"dcp_world": 2, "dcp_interleave": 0}, ValueError, "dcp_interleave"),
        ({"dcp_world": 2, "dcp_interleave": 3}, ValueError, "dcp_interleave"),
        ({"dcp_world": 2.0}, TypeError, "dcp_world"),
        ({"dcp_world": True}, TypeError, "dcp_world"),
        ({"dcp_world": 2, "dcp_rank": None}, TypeError, "dcp_rank"),
        ({"reserved_slot": 2**63}, ValueError, "reserved_slot"),
        ({"reserved_slot": False}, TypeError, "reserved_slot"),
        ({"reserved_slot": torch.tensor(0)}, TypeError, "reserved_slot"),
    ],
)
def test_B012_slot_rules_that_cannot_be_are_refused_by_name(
    rules: dict[str, object], error: type[Exception], name: str
) -> None:
    call = make(2)
    paged = call.pool.allocate(torch.device("cpu"))[1].unflatten(0, (4, 4))
    with pytest.raises(error, match=f"^{name}: "):
        prepare_chain(call.q_nope, call.q_rope, call.k_nope, call.k_rope, paged, call.loc, **rules)  # type: ignore[arg-type]


def test_B012_a_handle_refuses_a_rank_outside_its_world(device: KernelDevice) -> None:
    call = make(2, dcp_world=4)
    for rank in (-1, 4):
        with pytest.raises(ValueError, match=r"^dcp_rank: "):
            run(call.with_rank(rank), device, fused=True)


@pytest.mark.parametrize("pitch", [40, 48, 41])
@pytest.mark.parametrize("written", [[], [0], [1], [4], [0, 1, 2, 3, 4], [1, 3]])
def test_rows_are_written_the_same_without_a_mask(pitch: int, written: list[int]) -> None:
    """The chain's way on a GPU, run here on the CPU: fixed shapes, skipped tokens change nothing."""
    pool = Guarded.pool(9, 40, pitch)
    whole, cache = pool.allocate(torch.device("cpu"))
    wanted, rows = pool.allocate(torch.device("cpu"))
    new = torch.randint(0, 256, (5, 40), dtype=torch.uint8, generator=torch.Generator().manual_seed(pitch))
    loc = torch.tensor([2, 8, 0, 7, 5])
    mask = torch.zeros(5, dtype=torch.bool)
    mask[written] = True
    for token in written:
        rows[loc[token]] = new[token]
    write_rows(cache, torch.where(mask, loc, 2**40 + 17), mask, new)
    assert torch.equal(whole, wanted)


def test_of_two_tokens_with_one_slot_every_word_comes_from_either() -> None:
    cache = torch.full((4, 16), 0xA5, dtype=torch.uint8)
    new = torch.randint(0, 256, (2, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    write_rows(cache, torch.tensor([2, 2]), torch.tensor([True, True]), new)
    for word in range(2):
        part = slice(8 * word, 8 * word + 8)
        assert any(torch.equal(cache[2, part], row[part]) for row in new)
    assert (cache[[0, 1, 3]] == 0xA5).all()


def test_destinations_follow_the_rule_for_every_slot() -> None:
    slots = torch.arange(-70, 300)
    for world, interleave in itertools.product([1, 2, 3, 8], [1, 3, 64]):
        for rank in range(world):
            row, written = destination_rows(slots, 40, 17, world, rank, interleave)
            found = [r if w else None for r, w in zip(row.tolist(), written.tolist(), strict=True)]
            rule = [oracle.cache_row(slot, 40, 17, world, rank, interleave) for slot in slots.tolist()]
            assert found == rule


def test_the_oracle_notices_a_wrong_byte(device: KernelDevice) -> None:
    call = make(2)
    result = run(call, device, fused=True)
    result.pool[3] ^= 1
    with pytest.raises(AssertionError, match="1 bytes of pool differ"):
        compare(result, expected(call), "kernel")
