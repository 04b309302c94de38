"""What the command line prints: JSON on stdout for programs, tables and progress for people, errors for both."""

import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import IntEnum
from typing import Any, Final, NoReturn, TypeVar

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from mlaprep.clients.doctor import Check
from mlaprep.clients.errors import KernelUnavailable, MlaprepError, ServiceError, SpecError
from mlaprep.kernels_cache.artifact import Manifest
from mlaprep.kernels_cache.errors import AmbiguousKeyError, CacheError

VARIANT_PREFIX: Final = "mla_prepare-"
FULL_TABLE_WIDTH: Final = 98
"""Columns from which a table has room for whole variant ids and keys."""

F = TypeVar("F", bound=Callable[..., None])


class ExitCode(IntEnum):
    """How a command ends."""

    OK = 0
    FAILED = 1
    USAGE = 2
    """A wrong option, specification, name or file."""
    UNAVAILABLE = 3
    """No compiler, service or cache entry that could answer; the same may work elsewhere or later."""


def stdout() -> Console:
    """For results. Made anew, so that it follows a redirected stream."""
    return Console(highlight=False, soft_wrap=False)


def stderr() -> Console:
    """For progress, notes and errors."""
    return Console(stderr=True, highlight=False)


def print_json(document: Mapping[str, Any]) -> None:
    """One JSON document on stdout."""
    sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=True) + "\n")


def kernel_document(manifest: Manifest, **more: Any) -> dict[str, Any]:
    """A manifest's members, and more beside them."""
    return manifest.to_dict() | more


def kernel_table(
    manifests: Iterable[Manifest],
    notes: Mapping[str, str] | None = None,
    width: int = 80,
    *,
    figures: int = 4,
    noted: str = "",
    narrow: bool | None = None,
) -> Table:
    """One row a kernel, sorted by variant and architecture.

    ``notes`` adds a last column, by key, called ``noted``; ``figures`` says how many of bytes, registers,
    spills and compile time there is room for. On a narrow terminal variants are named without their common
    prefix, so that each stays on one line.
    """
    narrow = width < FULL_TABLE_WIDTH if narrow is None else narrow
    names = ("bytes", "regs", "spill", "ms")
    if not narrow and notes is None:
        names = ("bytes", "registers", "spills", "compile ms")
    table = Table(box=SIMPLE_HEAD, header_style="bold", show_edge=False, pad_edge=False, collapse_padding=True)
    table.add_column(f"variant ({VARIANT_PREFIX}…)" if narrow else "variant", no_wrap=True)
    table.add_column("arch", min_width=7, no_wrap=True, style="cyan")
    for name, columns in zip(names[:figures], (6, 4, 5, 3), strict=False):
        table.add_column(name, min_width=columns, justify="right", no_wrap=True)
    if notes is not None:
        table.add_column(noted, min_width=max(map(len, notes.values()), default=0), no_wrap=True)
    previous = None
    for manifest in sorted(manifests, key=_variant_order):
        name = manifest.variant_id.removeprefix(VARIANT_PREFIX) if narrow else manifest.variant_id
        spills = manifest.spill_stores + manifest.spill_loads
        cells: list[str | Text] = [
            f"{manifest.cubin_size:,}",
            str(manifest.registers),
            Text(str(spills), style="red" if spills else "green"),
            f"{manifest.compile_ms:.0f}",
        ]
        row = ["" if name == previous else Text(name, style="bold"), manifest.arch, *cells[:figures]]
        if notes is not None:
            row.append(Text(notes.get(manifest.key, "")))
        table.add_row(*row)
        previous = name
    return table


def fields_table(rows: Iterable[tuple[str, object]]) -> Table:
    """Names and values, two columns."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(str(value)))
    return table


def checks_table(checks: Iterable[Check]) -> Table:
    """What a doctor found: a mark, the thing looked at, what is there, and what to do."""
    marks = {"ok": Text("ok", "green"), "warn": Text("warn", "yellow"), "missing": Text("missing", "bold red")}
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        found = Text(check.found)
        if check.advice:
            found.append(f"\n→ {check.advice}", style="cyan")
        table.add_row(marks[check.status], check.name, found)
    return table


@contextlib.contextmanager
def progress(title: str, total: int, *, quiet: bool, console: Console | None = None) -> Iterator[Callable[[str], None]]:
    """Yields a function to call with a line about each finished step.

    A bar on a terminal, a line a step elsewhere, nothing when quiet. By default it goes to stderr.
    """
    console = console or stderr()
    if quiet:
        yield lambda line: None
        return
    if not console.is_terminal:
        width, count = len(str(total)), 0

        def plain(line: str) -> None:
            nonlocal count
            count += 1
            console.print(Text(f"[{count:{width}}/{total}] {line}"), soft_wrap=True)

        yield plain
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=total)

        def advance(line: str) -> None:
            bar.update(task, advance=1)

        yield advance


def reports_errors(command: F) -> F:
    """End a command by what it raised: a few lines and an exit code, never a traceback.

    With ``--json`` stdout gets ``{"error": {...}}``.
    """

    @functools.wraps(command)
    def guarded(*args: Any, **options: Any) -> None:
        try:
            command(*args, **options)
        except (MlaprepError, CacheError, OSError) as error:
            fail(error, as_json=bool(options.get("as_json")))

    return guarded  # type: ignore[return-value]  # wraps keeps the signature


def fail(error: BaseException, *, as_json: bool) -> NoReturn:
    """Print an error and leave with its exit code."""
    if isinstance(error, BrokenPipeError):  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(ExitCode.FAILED) from None
    if as_json:
        print_json({"error": error_document(error)})
    else:
        console = stderr()
        if isinstance(error, SpecError):
            for problem in error.problems:
                found = Text.assemble((problem.field, "bold"), f": found {problem.found}; allowed: {problem.allowed}")
                console.print(Text("error ", style="bold red") + found, soft_wrap=True)
        else:
            console.print(Text("error ", style="bold red") + Text(str(error)), soft_wrap=True)
    raise typer.Exit(exit_code(error)) from None


def error_document(error: BaseException) -> dict[str, Any]:
    """An error as JSON values."""
    document: dict[str, Any] = {"type": type(error).__name__, "message": str(error)}
    if isinstance(error, SpecError):
        document["problems"] = [
            {"field": problem.field, "found": problem.found, "allowed": problem.allowed} for problem in error.problems
        ]
    if isinstance(error, KernelUnavailable):
        document["attempts"] = list(error.attempts)
    return document


def exit_code(error: BaseException) -> ExitCode:
    """The exit code an error ends a command with."""
    if isinstance(error, SpecError | AmbiguousKeyError | typer.BadParameter):
        return ExitCode.USAGE
    if isinstance(error, KernelUnavailable | ServiceError):
        return ExitCode.UNAVAILABLE
    return ExitCode.FAILED


def _variant_order(manifest: Manifest) -> tuple[object, ...]:
    spec = manifest.spec
    heads = spec.get("num_heads")
    return (heads if isinstance(heads, int) else 0, manifest.variant_id, _arch_order(manifest.arch))


def _arch_order(arch: str) -> tuple[int, str]:
    digits = "".join(c for c in arch if c.isdigit())
    return int(digits or 0), arch
