"""Commands that look at kernels, fetch them and clear them away."""

import os
import re
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
from mlaprep.clients.cli_inspect import Against, Resources, Sass, View
from mlaprep.clients.cli_options import (
    ArchFilter,
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
    full_variant_id,
    open_store,
    parse_size,
    select_archs,
    select_specs,
)
from mlaprep.clients.cli_output import (
    FULL_TABLE_WIDTH,
    error_document,
    exit_code,
    fields_table,
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
from mlaprep.clients.supply import Obtained
from mlaprep.kernels_cache.artifact import KernelArtifact, Manifest
from mlaprep.kernels_cache.disk import DiskStore
from mlaprep.kernels_cache.store import KernelStore, MemoryStore
from mlaprep.templates.arch import DEFAULT_ARCHS, Arch
from mlaprep.templates.render import render as render_source
from mlaprep.templates.spec import KernelSpec, parse_variant_id

_DIGEST_PREFIX: Final = re.compile(r"[0-9a-f]{4,64}", re.ASCII)
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
def ls(
    archs: ArchFilter = None,
    cache_dir: CacheDir = None,
    as_json: Json = False,
) -> None:
    """List the kernels in the local cache."""
    store = open_store(cache_dir)
    wanted = {str(arch) for arch in select_archs(archs)} if archs else None
    manifests = [manifest for manifest in store.list() if wanted is None or manifest.arch in wanted]
    if as_json:
        print_json({"kernels": [kernel_document(manifest) for manifest in manifests]})
        return
    console = stdout()
    if not manifests:
        console.print("No kernels here yet. Build some: mlaprep compile --preset kimi-k3 --tp 8")
        return
    keys = {manifest.key: manifest.key[:12] for manifest in manifests} if console.width >= FULL_TABLE_WIDTH else None
    console.print(kernel_table(manifests, keys, console.width))
    total = sum(manifest.cubin_size for manifest in manifests)
    console.print(Text(f"{kernels(len(manifests))}, {total:,} bytes of cubin, in {_place(store)}", style="dim"))


@reports_errors
def show(
    name: Annotated[
        str, typer.Argument(metavar="KERNEL", help="A variant id, or the first digits of a key or digest.")
    ],
    archs: Archs = None,
    cache_dir: CacheDir = None,
    as_json: Json = False,
) -> None:
    """Show one kernel of the local cache."""
    manifest = find_manifest(open_store(cache_dir), name, archs)
    if as_json:
        print_json(kernel_document(manifest))
        return
    console = stdout()
    rows = [(key, value) for key, value in manifest.to_dict().items() if not isinstance(value, dict | list)]
    rows += [("options", " ".join(manifest.options)), ("parameters", _parameters(manifest))]
    rows += [("spec", ", ".join(f"{field}={value}" for field, value in manifest.spec.items()))]
    console.print(fields_table(rows))


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
    with KernelClient(url, token=token, store=store, on_miss="error") as client:
        outcomes = bring(specs, select_archs(archs), client.obtain, "fetching", quiet=as_json)
    files: dict[str, dict[str, str]] = {}
    if output is not None:
        for outcome in outcomes:
            if outcome.obtained is not None:
                files[outcome.obtained.artifact.key] = write_artifact(output, outcome.obtained.artifact)
    report(outcomes, as_json=as_json, more={"files": files} if files else None)


@reports_errors
def gc(
    max_bytes: Annotated[
        str, typer.Option("--max-bytes", metavar="SIZE", help="Keep at most this much, e.g. 64M; 0 removes everything.")
    ],
    cache_dir: CacheDir = None,
    as_json: Json = False,
) -> None:
    """Remove the least recently used kernels, and what killed processes left behind."""
    limit = parse_size(max_bytes)
    store = open_store(cache_dir)
    if not isinstance(store, DiskStore):
        raise KernelUnavailable("there is no kernel cache on disk to clear; name one with --cache-dir")
    evicted = store.gc(limit)
    stats = store.stats()
    if as_json:
        print_json({"removed": evicted, "entries": stats.entries, "bytes": stats.bytes, "max_bytes": limit})
        return
    stdout().print(
        Text(f"removed {kernels(evicted)}; {kernels(stats.entries)}, {stats.bytes:,} bytes left in {store.root}")
    )


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
    outcomes: Sequence[Outcome], *, as_json: bool, compiles: int | None = None, more: Mapping[str, object] | None = None
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
        for outcome, error in failed:
            line = Text.assemble(("error ", "bold red"), f"{outcome.spec.variant_id} {outcome.arch}: {error}")
            stderr().print(line, soft_wrap=True)
    if failed:
        raise typer.Exit(exit_code(failed[0][1]))


def find_manifest(store: KernelStore, name: str, archs: Sequence[str] | None) -> Manifest:
    """The one kernel that a variant id or the start of a key or digest names.

    Raises:
        SpecError: no such form, or several kernels fit; they are named.
        KernelUnavailable: none fits.
    """
    manifests = list(store.list())
    if archs:
        wanted = {str(arch) for arch in select_archs(archs)}
        manifests = [manifest for manifest in manifests if manifest.arch in wanted]
    if _DIGEST_PREFIX.fullmatch(name):
        found = [m for m in manifests if m.key.startswith(name) or m.cubin_sha256.startswith(name)]
    else:
        variant_id = parse_variant_id(full_variant_id(name)).variant_id
        found = [manifest for manifest in manifests if manifest.variant_id == variant_id]
    if not found:
        raise KernelUnavailable(f"no kernel in {_place(store)} is named so; `mlaprep ls` lists what is there")
    if len(found) > 1:
        shown = ", ".join(f"{manifest.arch} {manifest.key[:12]}" for manifest in found[:8])
        raise SpecError(FieldProblem("KERNEL", f"a name that {len(found)} kernels share", f"one of {shown}, or --arch"))
    return found[0]


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


def kernels(count: int) -> str:
    """A number of kernels in words."""
    return f"{count} kernel{'' if count == 1 else 's'}"


def _line(outcome: Outcome) -> str:
    target = f"{outcome.spec.variant_id} {outcome.arch}"
    if outcome.obtained is None:
        return f"{target}: failed"
    manifest = outcome.obtained.artifact.manifest
    state = "cached" if outcome.obtained.cached else f"compiled in {manifest.compile_ms:.0f} ms"
    return f"{target}: {manifest.cubin_size:,} bytes, {state}"


def _parameters(manifest: Manifest) -> str:
    parameters = manifest.launch.get("parameters")
    return ", ".join(str(pair[0]) for pair in parameters) if isinstance(parameters, list) else ""


def _place(store: KernelStore) -> str:
    return str(store.root) if isinstance(store, DiskStore) else "memory"
