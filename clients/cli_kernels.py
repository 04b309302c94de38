"""Commands that render and fetch kernels, and what every command that brings some prints."""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, TypeVar

import typer
from rich.console import Console
from rich.syntax import Syntax
from rich.text import Text

from mlaprep.clients import cli_inspect
from mlaprep.clients.building import Obtained
from mlaprep.clients.cli_inspect import Against, Resources, Sass, View
from mlaprep.clients.cli_options import (
    Archs,
    CacheDir,
    Json,
    Overrides,
    Presets,
    SpecFile,
    Token,
    Tps,
    Url,
    Variants,
    open_store,
    select_archs,
    select_specs,
)
from mlaprep.clients.cli_output import (
    error_document,
    exit_code,
    kernel_document,
    kernel_table,
    print_json,
    progress,
    reports_errors,
    stderr,
    stdout,
)
from mlaprep.clients.client import KernelClient
from mlaprep.clients.errors import FieldProblem, KernelUnavailable, MlaprepError, SpecError
from mlaprep.kernels_cache.artifact import KernelArtifact
from mlaprep.kernels_cache.store import MemoryStore
from mlaprep.templates.arch import DEFAULT_ARCHS, Arch
from mlaprep.templates.render import render as render_source
from mlaprep.templates.spec import KernelSpec

_MAX_THREADS: Final = 8

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one kernel: ``obtained``, or the error that kept it from being had."""

    spec: KernelSpec
    arch: Arch
    obtained: Obtained | None = None
    error: MlaprepError | None = None


@reports_errors
def render(
    presets: Presets = None,
    tps: Tps = None,
    variants: Variants = None,
    spec_file: SpecFile = None,
    overrides: Overrides = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", dir_okay=False, help="Write the source here, not to stdout.")
    ] = None,
    archs: Annotated[
        list[str] | None,
        typer.Option(
            "--arch", metavar="ARCH", help=f"Target of --sass and --resources. Repeats. Default: {DEFAULT_ARCHS[0]}."
        ),
    ] = None,
    sass: Sass = False,
    resources: Resources = False,
    against: Against = None,
    as_json: Json = False,
) -> None:
    """Print the CUDA source of one kernel, or its machine code. The source needs no compiler."""
    specs = select_specs(presets, tps, variants, spec_file, overrides)
    if len(specs) > 1:
        raise SpecError(FieldProblem("kernels", f"{len(specs)} variants", "one variant; narrow it with --tp"))
    source = render_source(specs[0])
    if output is not None:
        output.write_text(source.text, "utf-8")
    view = View(sass, resources, against)
    targets = select_archs(archs) if archs else DEFAULT_ARCHS[:1]
    seen = cli_inspect.show_render(source, view, targets, as_json=as_json) if view else {}
    if as_json:
        head = {"variant_id": source.spec.variant_id, "source_sha256": source.sha256, "entry": source.entry}
        print_json(head | {"spec": source.spec.to_dict(), "launch": source.launch, "source": source.text} | seen)
    elif view:
        return
    elif output is not None:
        stderr().print(Text(f"{output}: {source.spec.variant_id}, sha256 {source.sha256}"), soft_wrap=True)
    else:
        console = stdout()
        if console.is_terminal:
            console.print(Syntax(source.text, "cuda", background_color="default", word_wrap=False))
        else:
            typer.echo(source.text, nl=False)


@reports_errors
def fetch(
    presets: Presets = None,
    tps: Tps = None,
    variants: Variants = None,
    spec_file: SpecFile = None,
    overrides: Overrides = None,
    archs: Archs = None,
    url: Url = None,
    token: Token = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", file_okay=False, help="Write cubin, manifest and source here, not to the cache."
        ),
    ] = None,
    cache_dir: CacheDir = None,
    as_json: Json = False,
) -> None:
    """Fetch kernels from a service as a cold worker does, and verify them."""
    if not url:
        raise SpecError(FieldProblem("url", "nothing", "--url http://host:port, or MLAPREP_URL"))
    specs = select_specs(presets, tps, variants, spec_file, overrides)
    store = MemoryStore() if output is not None else open_store(cache_dir)
    with KernelClient(url, token=token, store=store, on_miss="error", report_misses=False) as client:
        outcomes = bring(specs, select_archs(archs), client.obtain, "fetching", quiet=as_json)
    files: dict[str, dict[str, str]] = {}
    if output is not None:
        for outcome in outcomes:
            if outcome.obtained is not None:
                files[outcome.obtained.artifact.key] = write_artifact(output, outcome.obtained.artifact)
    report(outcomes, as_json=as_json, more={"files": files} if files else None, url=url)


def bring(
    specs: Sequence[KernelSpec],
    archs: Sequence[Arch],
    obtain: Callable[[KernelSpec, Arch], Obtained],
    title: str,
    *,
    quiet: bool,
    threads: int | None = None,
    console: Console | None = None,
) -> list[Outcome]:
    """Every spec for every architecture, several at a time, in order, failures among them."""
    targets = [(spec, arch) for spec in specs for arch in archs]
    with (
        progress(title, len(targets), quiet=quiet, console=console) as step,
        ThreadPoolExecutor(threads or min(_MAX_THREADS, os.cpu_count() or 1)) as pool,
    ):

        def one(target: tuple[KernelSpec, Arch]) -> Outcome:
            spec, arch = target
            try:
                outcome = Outcome(spec, arch, obtain(spec, arch))
            except MlaprepError as error:
                outcome = Outcome(spec, arch, error=error)
            step(_line(outcome))
            return outcome

        return list(pool.map(one, targets))


def look(
    outcomes: Sequence[Outcome],
    view: View,
    folder: Path | None,
    obtain: Callable[[KernelSpec, Arch], Obtained],
    *,
    as_json: bool,
) -> dict[str, object]:
    """Save the kernels that were had, and show what the view asks for; the same as JSON values."""
    artifacts = [outcome.obtained.artifact for outcome in outcomes if outcome.obtained is not None]
    # Looked at first: the folder may be the build that they are compared with.
    shown = cli_inspect.examine(artifacts, view, lambda spec, arch: obtain(spec, arch).artifact) if view else []
    more: dict[str, object] = {}
    if folder is not None:
        more["files"] = {artifact.key: write_artifact(folder, artifact) for artifact in artifacts}
    if view and as_json:
        more["inspections"] = cli_inspect.documents(shown, view)
    elif view:
        cli_inspect.present(shown, view)
    return more


def report(
    outcomes: Sequence[Outcome],
    *,
    as_json: bool,
    compiles: int | None = None,
    more: Mapping[str, object] | None = None,
    url: str | None = None,
) -> None:
    """Print kernels and failures, and leave with the exit code of the first failure if there is one."""
    had = [outcome.obtained for outcome in outcomes if outcome.obtained is not None]
    failed = [(outcome, outcome.error) for outcome in outcomes if outcome.error is not None]
    if as_json:
        document: dict[str, object] = {
            "kernels": [kernel_document(item.artifact.manifest, cached=item.cached, tier=item.tier) for item in had],
            "compiles": sum(not item.cached for item in had) if compiles is None else compiles,
        }
        if failed:
            document["errors"] = [
                {"variant_id": outcome.spec.variant_id, "arch": str(outcome.arch)} | error_document(error)
                for outcome, error in failed
            ]
        print_json(document | dict(more or {}))
    else:
        console = stdout()
        if had:
            notes = {item.artifact.key: "cached" if item.cached else "new" for item in had}
            console.print(kernel_table([item.artifact.manifest for item in had], notes, console.width))
        _print_failures(failed, url)
    if failed:
        raise typer.Exit(exit_code(failed[0][1]))


def _print_failures(failed: Sequence[tuple[Outcome, MlaprepError]], url: str | None) -> None:
    """A line a kernel, then what each place said: once for all kernels that met the same."""
    console = stderr()
    told: tuple[str, ...] = ()
    for outcome, error in failed:
        attempts = error.attempts if isinstance(error, KernelUnavailable) else ()
        message = "not to be had" if attempts else str(error)
        line = Text.assemble(("error ", "bold red"), f"{outcome.spec.variant_id} {outcome.arch}: {message}")
        console.print(line, soft_wrap=True)
        if attempts != told:
            for attempt in attempts:
                console.print(Text(f"  {attempt}"), soft_wrap=True)
        told = tuple(attempts)
    if told:
        command = "mlaprep doctor" if url is None else f"mlaprep doctor --url {url}"
        console.print(Text(f"→ {command} says what is wrong there, and what to do", style="cyan"), soft_wrap=True)


def write_artifact(folder: Path, artifact: KernelArtifact) -> dict[str, str]:
    """Write cubin, manifest and source into a folder; the paths, by kind."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{artifact.manifest.variant_id}.{artifact.manifest.arch}"
    contents = {
        "cubin": (folder / f"{stem}.cubin", artifact.cubin),
        "manifest": (folder / f"{stem}.json", artifact.manifest.to_json().encode()),
        "source": (folder / f"{stem}.cu", artifact.source.encode()),
    }
    for path, content in contents.values():
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_bytes(content)
        temporary.replace(path)
    return {kind: str(path) for kind, (path, _) in contents.items()}


def _line(outcome: Outcome) -> str:
    target = f"{outcome.spec.variant_id} {outcome.arch}"
    if outcome.obtained is None:
        return f"{target}: failed"
    manifest = outcome.obtained.artifact.manifest
    state = "cached" if outcome.obtained.cached else f"compiled in {manifest.compile_ms:.0f} ms"
    return f"{target}: {manifest.cubin_size:,} bytes, {state}"
