"""The commands that compare builds: one stored kernel with another, and stored ones with what is built now."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Final

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from mlaprep.clients import cli_inspect
from mlaprep.clients.cli_cache import find_kernels
from mlaprep.clients.cli_options import (
    ArchFilter,
    CacheDir,
    Json,
    Presets,
    Tps,
    Variants,
    existing_store,
    named_cache_dir,
    select_archs,
    select_specs,
)
from mlaprep.clients.cli_output import VARIANT_PREFIX, ExitCode, print_json, progress, reports_errors, stdout
from mlaprep.clients.errors import FieldProblem, KernelUnavailable, SpecError
from mlaprep.clients.wording import count
from mlaprep.kernels_cache.artifact import KernelArtifact
from mlaprep.kernels_cache.audit import Finding, audit
from mlaprep.service.builds import compare
from mlaprep.service.compiler import Compiler
from mlaprep.service.errors import BuilderClosed, CompileCrashed, CompilerUnavailable, DisassemblerUnavailable
from mlaprep.service.inspect import diff as difference
from mlaprep.service.inspect import inspect_all
from mlaprep.service.verification import Verdict, verify_builds

_WORDS: Final[Mapping[str, str]] = {
    "same": "the same",
    "explained": "other inputs",
    "differs": "DIFFERS",
    "damaged": "damaged",
    "failed": "failed",
}


@reports_errors
def diff(
    one: Annotated[str, typer.Argument(metavar="ONE", help="The build before: a key, a digest, or a variant id.")],
    other: Annotated[str, typer.Argument(metavar="OTHER", help="The build after, in the same way.")],
    archs: ArchFilter = None,
    cache_dir: CacheDir = None,
    as_json: Json = False,
) -> None:
    """Show how two kernels of the local cache differ: figures, opcodes and machine code. Needs nvdisasm."""
    before, after = (_only(name, text, archs, cache_dir) for name, text in (("ONE", one), ("OTHER", other)))
    try:
        if as_json:
            print_json(compare(before, after))
            return
        first, second = inspect_all([before, after])
    except DisassemblerUnavailable as error:
        raise KernelUnavailable(str(error)) from error
    shown = cli_inspect.Shown(second, difference(first, second))
    cli_inspect.present([shown], cli_inspect.View(other=one))


@reports_errors
def verify_build(
    presets: Presets = None,
    tps: Tps = None,
    variants: Variants = None,
    archs: ArchFilter = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail too where another source or another NVRTC explains other bytes.")
    ] = False,
    cache_dir: CacheDir = None,
    as_json: Json = False,
) -> None:
    """Rebuild the kernels of the local cache and compare the bytes; exit code 1 where equal inputs gave others."""
    named = bool(presets or variants)
    if tps and not presets:
        raise SpecError(FieldProblem("tp", "a degree without a preset", "--preset NAME beside it"))
    wanted = {spec.variant_id for spec in select_specs(presets, tps, variants, None, None)} if named else None
    findings = list(_findings(wanted, archs, cache_dir))
    verdicts: list[Verdict] = []
    if findings:
        with Compiler() as compiler, progress("rebuilding", len(findings), quiet=as_json) as advance:
            try:
                for verdict in verify_builds(findings, compiler):
                    verdicts.append(verdict)
                    advance(f"{verdict.variant_id} {verdict.arch}: {_WORDS[verdict.outcome]}")
            except (CompilerUnavailable, CompileCrashed, BuilderClosed) as error:
                raise KernelUnavailable(str(error)) from error
    counts: Counter[str] = Counter(verdict.outcome for verdict in verdicts)
    if as_json:
        print_json({"counts": dict(counts), "kernels": [verdict.to_dict() for verdict in verdicts]})
    else:
        _print_verdicts(verdicts, counts, str(named_cache_dir(cache_dir)))
    if not verdicts and named:
        raise KernelUnavailable(f"none of these kernels is in {named_cache_dir(cache_dir)}, so nothing was verified")
    if not all(verdict.outcome == "same" if strict else verdict.good for verdict in verdicts):
        raise typer.Exit(ExitCode.FAILED)


def _findings(wanted: set[str] | None, archs: Sequence[str] | None, cache_dir: str | None) -> Iterator[Finding]:
    """The entries that a command line selects. One that cannot be read may be any variant, and is never left out."""
    store = existing_store(cache_dir)
    targets = {str(arch) for arch in select_archs(archs)} if archs else None
    for finding in audit(store.root) if store is not None else ():
        of_variant = wanted is None or finding.manifest is None or finding.manifest.variant_id in wanted
        if of_variant and (targets is None or finding.arch in targets):
            yield finding


def _only(name: str, text: str, archs: Sequence[str] | None, cache_dir: str | None) -> KernelArtifact:
    """The one kernel that an argument names, read whole. Raises SpecError or KernelUnavailable."""
    store = existing_store(cache_dir)
    found = find_kernels(store, text, archs, str(named_cache_dir(cache_dir)))
    if len(found) > 1:
        built = ", ".join(each.manifest.arch for each in found)
        raise SpecError(FieldProblem(name, f"a variant built for {built}", "one of them with --arch, or a key"))
    artifact = None if store is None or found[0].damage else store.get(found[0].manifest.key)
    if artifact is None:
        raise KernelUnavailable(f"{found[0].manifest.key}: {found[0].damage or 'gone meanwhile'}")
    return artifact


def _print_verdicts(verdicts: Sequence[Verdict], counts: Mapping[str, int], place: str) -> None:
    console = stdout()
    told = ", ".join(f"{counts[outcome]:,} {word}" for outcome, word in _WORDS.items() if counts[outcome])
    noted = [verdict for verdict in verdicts if verdict.outcome != "same"]
    if noted:
        table = Table(box=SIMPLE_HEAD, header_style="bold", show_edge=False, pad_edge=False, collapse_padding=True)
        for title in ("key", "arch", "result"):
            table.add_column(title, no_wrap=True)
        table.add_column(f"why ({VARIANT_PREFIX}…)", overflow="fold")
        for verdict in noted:
            word = Text(_WORDS[verdict.outcome], style="" if verdict.good else "bold red")
            name = verdict.variant_id.removeprefix(VARIANT_PREFIX) or "unreadable"
            table.add_row(verdict.key[:12], verdict.arch, word, Text(f"{name}: {'; '.join(verdict.reasons)}"))
        console.print(table)
    console.print(Text(f"{count(len(verdicts), 'kernel')} of {place} rebuilt" + (f": {told}" if told else "")))
