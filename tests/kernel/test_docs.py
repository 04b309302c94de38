"""What docs/kernel.md says in tables, held to the code."""

from pathlib import Path

from kernel import oracle
from kernel.calls import cache_width

from mlaprep.templates.spec import KernelSpec


def rows(page: str, first: str) -> list[list[str]]:
    """The cells of a table's rows whose first cell begins with ``first``."""
    table = (line for line in page.splitlines() if line.startswith(f"| {first}"))
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table]


def test_the_alignments_are_those_of_the_spec(root: Path) -> None:
    page = (root / "docs" / "kernel.md").read_text()
    operands = {"inputs": ("fp8", "k_nope_token_stride", 2), "pool of codes": ("fp8", "cache_row_stride", 1)}
    operands["pool of `same`"] = ("same", "cache_row_stride", 2)
    for first, (layout, field, itemsize) in operands.items():
        ((_, *stated),) = rows(page, first)
        for cell, elements in zip(stated, (16, 8, 4, 2), strict=True):
            spec = KernelSpec(num_heads=2, layout=layout, elements_per_thread=elements)
            assert int(cell.split()[0]) == spec.stride_unit(field) * itemsize, first
    tiles = KernelSpec(num_heads=2, layout="ds_mla", elements_per_thread=4)
    assert tiles.stride_unit("cache_row_stride") == 4
    wide = KernelSpec(num_heads=2, load_bytes=32)
    assert f"({wide.stride_unit('q_nope_token_stride') * 2} with `load_bytes` 32)" in page
    kept = KernelSpec(num_heads=2, layout="same", elements_per_thread=16)
    assert kept.stride_unit("out_token_stride") * 2 == 16


def test_a_row_of_tiles_has_the_stated_width(root: Path) -> None:
    page = (root / "docs" / "kernel.md").read_text()
    assert f"{cache_width('ds_mla', 512, 64)} at 512/64" in page
    assert KernelSpec(num_heads=1, layout="ds_mla").cache_width == cache_width("ds_mla", 512, 64)


def test_the_bytes_are_those_of_the_literal_table(root: Path) -> None:
    page = (root / "docs" / "kernel.md").read_text()
    ((saturating, code, *_),) = rows(page, "448,")
    for value in (float(word.replace("+∞", "inf")) for word in saturating.split(", ")):
        assert f"`{oracle.LITERAL[value]:02x}`" == code
