"""The grid, a pure function of its arguments, at its limits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlaprep.clients.plan import MAX_TOKENS, LaunchConfig, RowShape, plan_launch
from mlaprep.templates.render import MAX_THREADS_PER_BLOCK, render
from mlaprep.templates.spec import KernelSpec

GRID_LIMITS = (2**31 - 1, 65_535, 65_535)
BLOCK_LIMITS = (1024, 1024, 64)
UINT32 = 2**32


def shape_of(**fields: object) -> RowShape:
    return RowShape.from_launch(render(KernelSpec(**fields)).launch)  # type: ignore[arg-type]


def check_plan(shape: RowShape, tokens: int, multiprocessors: int) -> LaunchConfig:
    plan = plan_launch(shape, tokens, multiprocessors)
    assert all(1 <= extent <= limit for extent, limit in zip(plan.grid, GRID_LIMITS, strict=True))
    assert all(1 <= extent <= limit for extent, limit in zip(plan.block, BLOCK_LIMITS, strict=True))
    threads, rows, block_tokens = plan.block
    assert threads == shape.threads_per_row
    assert threads * rows * block_tokens <= shape.max_threads_per_block <= MAX_THREADS_PER_BLOCK
    groups, *token_blocks = plan.grid
    assert shape.rows_per_token <= groups * rows < shape.rows_per_token + rows
    covered = token_blocks[0] * token_blocks[1] * block_tokens
    assert covered >= tokens
    # The kernel counts tokens and rows in 32 bits: not even those past the end may wrap.
    assert covered < UINT32
    # Blocks past the end cost time; there is never a whole plane of them.
    assert (token_blocks[1] - 1) * token_blocks[0] * block_tokens < tokens
    return plan


@pytest.mark.parametrize("multiprocessors", [1, 4, 132, 148])
@pytest.mark.parametrize(
    ("heads", "tokens"),
    [(128, 508), (128, 509), (128, 8192), (1, 65_535), (1, 65_536), (128, 462_422), (256, 1), (1, 1)],
)
def test_B010_every_row_is_covered(heads: int, tokens: int, multiprocessors: int) -> None:
    check_plan(shape_of(num_heads=heads), tokens, multiprocessors)


@pytest.mark.parametrize("heads", [1, 12, 128, 256])
def test_B010_the_largest_batch_fits_and_the_next_is_refused(heads: int) -> None:
    for fields in ({}, {"write_kv": False}, {"write_q": False}, {"kv_lora_rank": 1024, "rope_dim": 128}):
        shape = shape_of(num_heads=heads, **fields)
        check_plan(shape, MAX_TOKENS, 132)
        check_plan(shape, MAX_TOKENS - 1, 1)
        for tokens in (0, -1, MAX_TOKENS + 1, 2**32, 2**63):
            with pytest.raises(ValueError, match="tokens"):
                plan_launch(shape, tokens, 132)


@given(
    heads=st.integers(1, 256),
    rank=st.integers(1, 64).map(lambda n: 16 * n),
    rope_dim=st.integers(0, 16).map(lambda n: 8 * n),
    tokens=st.integers(1, MAX_TOKENS) | st.integers(1, 2000) | st.integers(65_000, 70_000),
    multiprocessors=st.integers(1, 256),
    rows=st.integers(0, 1),
)
def test_B010_any_plan_covers_every_row(
    heads: int, rank: int, rope_dim: int, tokens: int, multiprocessors: int, rows: int
) -> None:
    elements = 8 if rope_dim % 16 else 16
    shape = RowShape((rank + rope_dim) // elements, heads + rows, MAX_THREADS_PER_BLOCK)
    check_plan(shape, tokens, multiprocessors)
