"""Plots of a record of ``bench_prepare.py``, as PNG files for the documentation.

    python benchmarks/plot.py [RECORD] [--out docs/benchmarks]

Needs matplotlib (the extra ``bench``), no GPU and no torch.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from columns import (
    CHAIN,
    COMPILED,
    FLASHINFER_APPEND,
    FLASHINFER_SCATTER,
    FLOOR_PDL,
    OURS_GENERAL_PDL,
    OURS_PDL,
    SGLANG_PDL,
    TRITON_PDL,
    VLLM_PDL,
)
from document import DOCS, newest
from report import counted

LOOKS = {
    # name: (label, colour, line)
    CHAIN: ("five launches", "#8c8c8c", "-"),
    COMPILED: ("torch.compile", "#b07aa1", "-"),
    SGLANG_PDL: ("SGLang fused", "#e15759", "-"),
    VLLM_PDL: ("vLLM's structure, re-created", "#f28e2b", "-"),
    TRITON_PDL: ("Triton", "#59a14f", "-"),
    FLASHINFER_SCATTER: ("FlashInfer rope-quantise + scatter", "#e15759", "-"),
    FLASHINFER_APPEND: ("FlashInfer one-launch append", "#f28e2b", "-"),
    OURS_PDL: ("ours", "#1f5fa8", "-"),
    OURS_GENERAL_PDL: ("ours, strides compiled in", "#1f5fa8", ":"),
    FLOOR_PDL: ("empty kernel", "#000000", "--"),
}
FILES = ("times.png", "ratios.png", "roofline.png", "rope.png")


def main() -> int:
    parser = argparse.ArgumentParser(description="Plot a record of bench_prepare.py.")
    parser.add_argument("record", type=Path, nargs="?", help="default: the newest in benchmarks/results")
    parser.add_argument("--out", type=Path, default=DOCS / "benchmarks", help="default: docs/benchmarks")
    args = parser.parse_args()
    record = json.loads(args.record.read_text("utf-8")) if args.record else newest("prepare", schema=2)
    if record is None:
        print("no record to plot; run benchmarks/bench_prepare.py on a GPU", file=sys.stderr)
        return 2
    for path in plot(record, args.out):
        print(path.name)
    return 0


def plot(record: dict[str, Any], folder: Path) -> list[Path]:
    """Every plot that the record has cells for."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    plain, rope = ([cell for cell in record["cells"] if cell["rope"] == which] for which in (False, True))
    drawn = []
    for name, cells, draw in (
        ("times.png", plain, _times),
        ("ratios.png", plain, _ratios),
        ("roofline.png", plain, lambda cells: _roofline(cells, record["copy_gb_per_s"]["median"])),
        ("rope.png", rope, _times),
    ):
        if not cells:
            continue
        figure = draw(cells)
        figure.suptitle(f"{record['machine']['gpu']}, {record['date'][:10]}", fontsize=9, color="#666666")
        figure.savefig(folder / name, dpi=110)
        pyplot.close(figure)
        drawn.append(folder / name)
    return drawn


def _times(cells: list[dict[str, Any]]) -> Any:
    """Time against T: a column for each H, a row for each mode."""
    from matplotlib import pyplot

    heads = sorted({cell["heads"] for cell in cells})
    modes = [mode for mode in ("cold", "hot") if any(cell["mode"] == mode for cell in cells)]
    size = (3.1 * len(heads) + 0.6, 2.9 * len(modes) + 1.0)
    figure, axes = pyplot.subplots(len(modes), len(heads), figsize=size, squeeze=False, sharex=True, sharey=True)
    for row, mode in zip(axes, modes, strict=True):
        for axis, count in zip(row, heads, strict=True):
            mine = sorted(
                (cell for cell in cells if (cell["heads"], cell["mode"]) == (count, mode)), key=lambda c: c["tokens"]
            )
            for name, (label, colour, line) in LOOKS.items():
                points = [(c["tokens"], us) for c in mine if (us := counted(c["results"], name)) is not None]
                if points:
                    width = 2.2 if name == OURS_PDL else 1.2
                    axis.plot(*zip(*points, strict=True), line, color=colour, label=label, linewidth=width, marker=".")
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.grid(True, which="both", linewidth=0.3, alpha=0.5)
            axis.set_title(f"H = {count}, {mode}", fontsize=9)
        row[0].set_ylabel("µs a layer")
    for axis in axes[-1]:
        axis.set_xlabel("tokens")
        axis.set_xticks(ticks := sorted({cell["tokens"] for cell in cells}), [str(tick) for tick in ticks], fontsize=8)
        axis.minorticks_off()
    handles: dict[str, Any] = {}
    for axis in axes.flat:
        handles |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(list(handles.values()), list(handles), loc="lower center", ncols=min(4, len(handles)), fontsize=8)
    figure.tight_layout(rect=(0, 0.09, 1, 0.98))
    return figure


def _ratios(cells: list[dict[str, Any]]) -> Any:
    """Heat maps of ours over SGLang's and over the best peer: below 1 is faster."""
    from matplotlib import pyplot

    heads, tokens = (sorted({cell[key] for cell in cells}) for key in ("heads", "tokens"))
    names = (("ours/sglang", "ours / SGLang fused"), ("ours/best", "ours / best peer"))
    figure, axes = pyplot.subplots(2, 2, figsize=(2.2 + 1.3 * len(tokens), 1.8 + 1.1 * len(heads)), squeeze=False)
    for row, (name, title) in zip(axes, names, strict=True):
        for axis, mode in zip(row, ("cold", "hot"), strict=True):
            found = {
                (c["heads"], c["tokens"]): c["ratios"][name] for c in cells if c["mode"] == mode and name in c["ratios"]
            }
            grid = [[found.get((h, t), float("nan")) for t in tokens] for h in heads]
            axis.imshow(grid, cmap="RdYlGn_r", vmin=0.5, vmax=1.5, aspect="auto")
            for (h, t), ratio in found.items():
                axis.text(tokens.index(t), heads.index(h), f"{ratio:.2f}", ha="center", va="center", fontsize=8)
            axis.set_xticks(range(len(tokens)), [str(t) for t in tokens], fontsize=8)
            axis.set_yticks(range(len(heads)), [str(h) for h in heads], fontsize=8)
            axis.set_xlabel("tokens", fontsize=8)
            axis.set_ylabel("heads", fontsize=8)
            axis.set_title(f"{title}, {mode}", fontsize=9)
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    return figure


def _roofline(cells: list[dict[str, Any]], copy_gb_per_s: float) -> Any:
    """Bytes a second against bytes a layer, under the two ceilings: the empty kernel and the copy's rate."""
    from matplotlib import pyplot

    cold = [cell for cell in cells if cell["mode"] == "cold"]
    floors = [cell["results"][FLOOR_PDL]["us"] for cell in cold if "us" in cell["results"].get(FLOOR_PDL, {})]
    figure, axis = pyplot.subplots(figsize=(7.4, 4.8))
    if floors:
        floor = sorted(floors)[len(floors) // 2]
        low, high = (pick(cell["bytes_a_layer"] for cell in cold) for pick in (min, max))
        steps = [low * (high / low) ** (step / 200) for step in range(201)]
        roof = [min(copy_gb_per_s, size / floor / 1000) for size in steps]
        axis.plot(steps, roof, "k--", linewidth=1, label=f"min(copy {copy_gb_per_s:.0f} GB/s, bytes / {floor:.2f} µs)")
    for name in (SGLANG_PDL, VLLM_PDL, OURS_PDL):
        label, colour, _ = LOOKS[name]
        points = [
            (c["bytes_a_layer"], c["bytes_a_layer"] / us / 1000) for c in cold if (us := counted(c["results"], name))
        ]
        if points:
            axis.scatter(*zip(*points, strict=True), s=22, color=colour, label=label, alpha=0.85)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("bytes a layer must move")
    axis.set_ylabel("GB/s")
    axis.grid(True, which="both", linewidth=0.3, alpha=0.5)
    axis.legend(fontsize=8)
    axis.set_title("cold inputs", fontsize=9)
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    return figure


if __name__ == "__main__":
    sys.exit(main())
