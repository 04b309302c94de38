"""What ``render`` and ``compile`` show of a kernel's machine code, alone or beside another build's."""

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from mlaprep.clients.cli_options import full_variant_id
from mlaprep.clients.cli_output import stdout
from mlaprep.clients.errors import FieldProblem, KernelUnavailable, SpecError
from mlaprep.clients.saved import read_beside, read_build, read_cubin
from mlaprep.kernels_cache.artifact import KernelArtifact
from mlaprep.service.compiler import Compiler
from mlaprep.service.errors import BuildError, CompileFailed, DisassemblerUnavailable
from mlaprep.service.inspect import Difference, Inspection, diff, inspect_all, inspect_cubin
from mlaprep.templates.arch import Arch
from mlaprep.templates.render import KernelSource, check_target
from mlaprep.templates.render import render as render_source
from mlaprep.templates.spec import KernelSpec, parse_variant_id

Sass = Annotated[bool, typer.Option("--sass", help="Show the machine code. Needs nvdisasm (extra inspect).")]
Resources = Annotated[
    bool, typer.Option("--resources", help="Show registers, memory, code size and instructions by class.")
]
Against = Annotated[
    str | None,
    typer.Option(
        "--diff", metavar="OTHER", help="Show what changed since another build: a variant id, a cubin, or a folder."
    ),
]
Save = Annotated[
    Path | None,
    typer.Option("--save", metavar="DIR", file_okay=False, help="Write the kernels here too, for a later --diff DIR."),
]

_STYLES: Final = {"+": "green", "-": "red", "@": "cyan"}
_MOST_OPCODES: Final = 12

Build = Callable[[KernelSpec, Arch], KernelArtifact]


@dataclass(frozen=True, slots=True)
class View:
    """What a command line asks to see beside what the command prints anyway."""

    sass: bool = False
    resources: bool = False
    other: str | None = None

    def __bool__(self) -> bool:
        return self.sass or self.resources or self.other is not None


@dataclass(frozen=True, slots=True)
class Shown:
    """One kernel, and how it differs from its counterpart if it has one."""

    inspection: Inspection
    difference: Difference | None


def examine(artifacts: Sequence[KernelArtifact], view: View, build: Build) -> list[Shown]:
    """Kernels taken apart as the view asks; ``build`` makes the other side where that is a variant id.

    Raises:
        SpecError: another side that is none, or holds no counterpart of any kernel.
        KernelUnavailable: there is no disassembler.
        ArtifactError, OSError: another side that is damaged or cannot be read.
    """
    try:
        inspections = inspect_all(artifacts)
        others = _counterparts(view.other, artifacts, build)
    except DisassemblerUnavailable as error:
        raise KernelUnavailable(str(error)) from error
    return [
        Shown(inspection, None if other is None else diff(other, inspection))
        for inspection, other in zip(inspections, others, strict=True)
    ]


def documents(shown: Sequence[Shown], view: View) -> list[dict[str, Any]]:
    """What was found, as JSON values."""
    found = []
    for item in shown:
        document: dict[str, Any] = {"variant_id": item.inspection.name, "arch": str(item.inspection.arch)}
        if view.resources:
            document["resources"] = item.inspection.resources.to_dict()
        if view.sass:
            document["sass"] = item.inspection.listing.text()
        if view.other is not None:
            document["diff"] = None if item.difference is None else item.difference.to_dict()
        found.append(document)
    return found


def present(shown: Sequence[Shown], view: View) -> None:
    """What was found, for people: machine code first, then differences, then figures."""
    console = stdout()
    if view.sass:
        for item in shown:
            _write([f"// {item.inspection.name} {item.inspection.arch}", *item.inspection.listing.text().splitlines()])
    if view.other is not None:
        for item in shown:
            _present_difference(item)
    if view.resources:
        for name in dict.fromkeys(item.inspection.name for item in shown):
            console.print(Text(name, style="bold"), soft_wrap=True)
            console.print(_resources_table([item.inspection for item in shown if item.inspection.name == name]))


def show_render(source: KernelSource, view: View, archs: Sequence[Arch], *, as_json: bool) -> dict[str, Any]:
    """``render`` with a view: how the source differs, and machine code compiled anew, past every cache.

    Returns the same as JSON values, and prints it for people unless told not to.

    Raises:
        KernelUnavailable: there is no compiler or no disassembler.
        SpecError, CompileFailed, ArtifactError, OSError: as for :func:`examine`, or the kernel does not compile.
    """
    reply: dict[str, Any] = {}
    if view.other is not None:
        changes = list(_source_difference(source, view.other))
        reply["diff"] = changes
        if not as_json:
            _write(changes or ["the sources are the same"])
    if view.sass or view.resources:
        with Compiler() as compiler:

            def build(spec: KernelSpec, arch: Arch) -> KernelArtifact:
                check_target(spec, arch)
                try:
                    return compiler.compile(source if spec == source.spec else render_source(spec), arch)
                except CompileFailed:
                    raise
                except BuildError as error:
                    raise KernelUnavailable(str(error), variant_id=spec.variant_id, arch=str(arch)) from error

            shown = examine([build(source.spec, arch) for arch in archs], view, build)
        reply["inspections"] = documents(shown, view)
        if not as_json:
            present(shown, view)
    return reply


def _counterparts(other: str | None, artifacts: Sequence[KernelArtifact], build: Build) -> Sequence[Inspection | None]:
    """What each kernel is compared with, None where the other side has nothing like it."""
    if other is None or not artifacts:
        return [None] * len(artifacts)
    archs = dict.fromkeys(Arch(artifact.manifest.arch) for artifact in artifacts)
    found = _read_other(other)
    if isinstance(found, KernelSpec):
        found = [build(found, arch) for arch in archs]
    elif isinstance(found, Path):
        return [inspect_cubin(read_cubin(found), found.name)] * len(artifacts)
    chosen = [_counterpart(artifact, found) for artifact in artifacts]
    needed = {each.key: each for each in chosen if each is not None}
    if not needed:
        raise SpecError(FieldProblem("diff", "a build without any of these kernels", "one that has one of them"))
    inspections = dict(zip(needed, inspect_all(needed.values()), strict=True))
    return [None if each is None else inspections[each.key] for each in chosen]


def _counterpart(artifact: KernelArtifact, others: Sequence[KernelArtifact]) -> KernelArtifact | None:
    """The same variant and target, else the only one for that target, else the only one."""
    manifest = artifact.manifest
    same_arch = [each for each in others if each.manifest.arch == manifest.arch]
    same = [each for each in same_arch if each.manifest.variant_id == manifest.variant_id]
    for candidates in (same, same_arch, others):
        if len(candidates) == 1:
            return candidates[0]
    return same[0] if same else None


def _read_other(other: str) -> list[KernelArtifact] | KernelSpec | Path:
    """Saved kernels, the spec of a variant id, or a cubin that stands alone.

    Raises:
        SpecError: neither a file, nor a folder, nor a variant id.
    """
    path = Path(other)
    if path.is_dir():
        return read_build(path)
    if path.is_file():
        beside = read_beside(path)
        return path if beside is None else [beside]
    try:
        return parse_variant_id(full_variant_id(other))
    except SpecError:
        allowed = "a variant id, a cubin, or a folder with kernels"
        raise SpecError(FieldProblem("diff", "a string that names no file, folder or variant", allowed)) from None


def _source_difference(source: KernelSource, other: str) -> Iterator[str]:
    found = _read_other(other)
    if isinstance(found, Path):
        raise SpecError(FieldProblem("diff", "a cubin without its source", "a variant id, or a folder with the source"))
    if isinstance(found, KernelSpec):
        name, text = found.variant_id, render_source(found).text
    else:
        ours = source.spec.variant_id
        saved = next(
            (each for each in found if each.manifest.variant_id == ours), found[0] if len(found) == 1 else None
        )
        if saved is None:
            raise SpecError(FieldProblem("diff", "a build without this kernel", "one that has it, or has one only"))
        name, text = saved.manifest.variant_id, saved.source
    yield from difflib.unified_diff(
        text.splitlines(), source.text.splitlines(), name, source.spec.variant_id, lineterm=""
    )


def _present_difference(item: Shown) -> None:
    name = f"{item.inspection.name} {item.inspection.arch}"
    found = item.difference
    if found is None or found.empty:
        _write([f"{name}: {'nothing to compare with' if found is None else f'the same as {found.one}'}"])
        return
    _write([f"{name}, since {found.one}:"])
    _write(f"  {_label(figure)} {before} → {after}" for figure, (before, after) in found.figures.items())
    changes = [f"{opcode} {before} → {after}" for opcode, (before, after) in found.opcodes.items()]
    more = len(changes) - _MOST_OPCODES
    if changes:
        _write([f"  {', '.join(changes[:_MOST_OPCODES])}{f' and {more} more' if more > 0 else ''}"])
    _write(found.sass)


def _resources_table(inspections: Sequence[Inspection]) -> Table:
    """A row a figure or class of instructions, a column an architecture."""
    table = Table(box=SIMPLE_HEAD, header_style="bold", show_edge=False, pad_edge=False, collapse_padding=True)
    table.add_column("", no_wrap=True)
    for inspection in inspections:
        table.add_column(str(inspection.arch), justify="right", no_wrap=True, min_width=8)
    columns: list[Mapping[str, int | None]] = [
        each.resources.figures() | {f"· {kind}": count for kind, count in each.resources.kinds.items()}
        for each in inspections
    ]
    for row in dict.fromkeys(name for column in columns for name in column):
        counts = [column.get(row, 0) for column in columns]
        bad = row.startswith("spill") or row == "stack_bytes"
        table.add_row(
            _label(row),
            *(Text("?" if n is None else f"{n:,}", style="red" if bad and n else "") for n in counts),
        )
    return table


def _label(figure: str) -> str:
    """A figure's name as people read it."""
    return figure.replace("_", " ")


def _write(lines: Iterable[str]) -> None:
    console = stdout()
    if not console.is_terminal:
        typer.echo("\n".join(lines))
        return
    for line in lines:
        console.print(Text(line, style=_STYLES.get(line[:1], "")), soft_wrap=True)
