"""Commands that look at the local cache and clear it; none of them makes a directory."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import typer
from rich.text import Text

from mlaprep.clients.cli_options import (
    ArchFilter,
    CacheDir,
    Json,
    existing_store,
    full_variant_id,
    named_cache_dir,
    parse_size,
    select_archs,
)
from mlaprep.clients.cli_output import (
    FULL_TABLE_WIDTH,
    ExitCode,
    fields_table,
    kernel_document,
    kernel_table,
    print_json,
    reports_errors,
    stderr,
    stdout,
)
from mlaprep.clients.errors import FieldProblem, KernelUnavailable, SpecError
from mlaprep.clients.freshness import is_current
from mlaprep.clients.wording import count, spell
from mlaprep.kernels_cache.artifact import Manifest
from mlaprep.kernels_cache.audit import Finding, audit
from mlaprep.kernels_cache.disk import DISK_BYTES, DiskStore
from mlaprep.kernels_cache.location import default_max_bytes
from mlaprep.templates.spec import parse_variant_id

_DIGEST_PREFIX: Final = re.compile(r"[0-9a-f]{4,64}", re.ASCII)
_KEY_DIGITS: Final = 12
_NARROW_KEY_DIGITS: Final = 8


@dataclass(frozen=True, slots=True)
class Stored:
    """One kernel of the cache: whether it is what this release would build, and what is wrong with it."""

    manifest: Manifest
    current: bool
    damage: str

    @property
    def state(self) -> str:
        if self.damage:
            return "damaged"
        return "" if self.current else "stale"

    def document(self) -> dict[str, Any]:
        """Its manifest and state as JSON values."""
        return kernel_document(self.manifest, current=self.current, damage=self.damage or None)


@reports_errors
def ls(
    archs: ArchFilter = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every kernel whole and check it; exit code 1 where one is damaged.")
    ] = False,
    cache_dir: CacheDir = None,
    as_json: Json = False,
) -> None:
    """List the kernels in the local cache; those that other templates made are marked stale."""
    store = existing_store(cache_dir)
    wanted = {str(arch) for arch in select_archs(archs)} if archs else None
    found = [f for f in _findings(store, whole=verify) if wanted is None or f.arch in wanted]
    kernels = [_stored(finding) for finding in found if finding.manifest is not None]
    unreadable = [finding for finding in found if finding.manifest is None]
    if as_json:
        document: dict[str, Any] = {"kernels": [kernel.document() for kernel in kernels]}
        if unreadable:
            document["unreadable"] = [{"arch": f.arch, "key": f.key, "damage": f.damage} for f in unreadable]
        print_json(document)
    else:
        _print_list(kernels, unreadable, named_cache_dir(cache_dir))
    if verify and (unreadable or any(kernel.damage for kernel in kernels)):
        raise typer.Exit(ExitCode.FAILED)


@reports_errors
def show(
    kernel: Annotated[str, typer.Argument(help="A variant id, or the first digits of a key or digest.")],
    archs: ArchFilter = None,
    cache_dir: CacheDir = None,
    as_json: Json = False,
) -> None:
    """Show and verify a kernel of the local cache; by its variant id, on every architecture it is built for."""
    found = find_kernels(existing_store(cache_dir), kernel, archs, str(named_cache_dir(cache_dir)))
    if as_json:
        print_json({"kernels": [stored.document() for stored in found]})
    elif len(found) == 1:
        stdout().print(fields_table(_details(found[0])))
    else:
        _print_builds(found)
    for stored in found:
        if stored.damage:
            told = f"{stored.manifest.arch} {stored.manifest.key[:_KEY_DIGITS]}: {stored.damage}"
            stderr().print(Text.assemble(("damaged ", "bold red"), told), soft_wrap=True)
    if any(stored.damage for stored in found):
        raise typer.Exit(ExitCode.FAILED)


@reports_errors
def gc(
    max_bytes: Annotated[
        str | None,
        typer.Option(
            "--max-bytes",
            metavar="SIZE",
            help="Keep at most this much, e.g. 64M; 0 removes everything. "
            f"Default: MLAPREP_CACHE_MAX_BYTES or {DISK_BYTES >> 30}G.",
        ),
    ] = None,
    stale: Annotated[
        bool, typer.Option("--stale", help="Remove every kernel that today's templates would not make.")
    ] = False,
    cache_dir: CacheDir = None,
    as_json: Json = False,
) -> None:
    """Remove the least recently used kernels, the quarantine, and what killed processes left behind."""
    limit = _limit() if max_bytes is None else parse_size(max_bytes)
    store = existing_store(cache_dir)
    outdated = removed = entries = size = 0
    if store is not None:
        if stale:
            outdated = sum(store.delete(key) for key in _stale_keys(store))
        removed = store.gc(limit)
        stats = store.stats()
        entries, size = stats.entries, stats.bytes
    if as_json:
        document = {"removed": outdated + removed, "stale": outdated, "entries": entries, "bytes": size}
        print_json(document | {"max_bytes": limit})
        return
    told = f"removed {count(outdated + removed, 'kernel')}" + (f", {outdated:,} of them stale" if stale else "")
    left = f"{count(entries, 'kernel')}, {count(size, 'byte')} left in {named_cache_dir(cache_dir)}"
    stdout().print(Text(f"{told}; {left}"))


def find_kernels(store: DiskStore | None, name: str, archs: Sequence[str] | None, place: str) -> list[Stored]:
    """What a variant id, or the start of a key or digest, names; each verified.

    By a variant id it is one kernel an architecture: of several, the one that this release would build, then
    the newest.

    Raises:
        SpecError: no such form, or digits that several kernels share; they are named.
        KernelUnavailable: nothing fits.
    """
    wanted = {str(arch) for arch in select_archs(archs)} if archs else None
    by_digits = _DIGEST_PREFIX.fullmatch(name) is not None
    variant_id = "" if by_digits else parse_variant_id(full_variant_id(name)).variant_id
    builds: dict[str, list[Stored]] = {}
    for finding in _findings(store, whole=True):
        manifest = finding.manifest
        if wanted is not None and finding.arch not in wanted:
            continue
        if manifest is None:
            if by_digits and finding.key.startswith(name):
                raise KernelUnavailable(f"{finding.arch} {finding.key}: damaged, and unreadable: {finding.damage}")
        elif by_digits and (manifest.key.startswith(name) or manifest.cubin_sha256.startswith(name)):
            builds.setdefault(manifest.cubin_sha256, []).append(_stored(finding))
        elif manifest.variant_id == variant_id:
            builds.setdefault(manifest.arch, []).append(_stored(finding))
    found = [max(same, key=lambda stored: (stored.current, stored.manifest.created_at)) for same in builds.values()]
    if not found:
        raise KernelUnavailable(f"no such kernel in {place}; `mlaprep ls` lists what is there")
    if by_digits and len(found) > 1:
        shown = ", ".join(f"{s.manifest.arch} {s.manifest.key[:_KEY_DIGITS]}" for s in found[:8])
        raise SpecError(FieldProblem("KERNEL", f"digits that {len(found)} kernels share", f"one of {shown}"))
    return sorted(found, key=lambda stored: len(stored.manifest.arch) * 1000 + int(_digits(stored.manifest.arch)))


def _findings(store: DiskStore | None, *, whole: bool) -> Iterator[Finding]:
    return iter(()) if store is None else audit(store.root, whole=whole)


def _stored(finding: Finding) -> Stored:
    assert finding.manifest is not None
    return Stored(finding.manifest, is_current(finding.manifest), finding.damage)


def _stale_keys(store: DiskStore) -> list[str]:
    manifests = [finding.manifest for finding in audit(store.root, whole=False)]
    return [manifest.key for manifest in manifests if manifest is not None and not is_current(manifest)]


def _limit() -> int:
    limit = default_max_bytes(os.environ)
    return DISK_BYTES if limit is None else limit


def _print_list(kernels: Sequence[Stored], unreadable: Sequence[Finding], place: object) -> None:
    console = stdout()
    if not kernels and not unreadable:
        console.print("No kernels here yet. Build some: mlaprep compile --preset kimi-k3 --tp 8")
        return
    if kernels:
        narrow = console.width < FULL_TABLE_WIDTH
        digits = _NARROW_KEY_DIGITS if narrow else _KEY_DIGITS
        notes = {k.manifest.key: f"{k.manifest.key[:digits]} {k.state}".rstrip() for k in kernels}
        manifests = [kernel.manifest for kernel in kernels]
        console.print(kernel_table(manifests, notes, console.width, figures=1 if narrow else 4, noted="key"))
    for finding in unreadable:
        console.print(Text(f"damaged {finding.arch} {finding.key[:_KEY_DIGITS]}: {finding.damage}", style="red"))
    total = sum(kernel.manifest.cubin_size for kernel in kernels)
    console.print(Text(f"{count(len(kernels), 'kernel')}, {count(total, 'byte')} of cubin, in {place}", style="dim"))
    if any(kernel.state == "stale" for kernel in kernels):
        console.print(Text("stale: made by other templates than today's; mlaprep gc --stale removes them", style="dim"))


def _print_builds(found: Sequence[Stored]) -> None:
    console = stdout()
    notes = {s.manifest.key: f"{s.manifest.key[:_NARROW_KEY_DIGITS]} {s.state}".rstrip() for s in found}
    figures = 1 if console.width < FULL_TABLE_WIDTH else 4
    console.print(
        kernel_table([s.manifest for s in found], notes, console.width, figures=figures, noted="key", narrow=True)
    )
    rows: list[tuple[str, object]] = []
    for stored in found:
        manifest = stored.manifest
        usage = f"{count(manifest.registers, 'register')}, {manifest.spill_stores + manifest.spill_loads} bytes spilled"
        memory = f"{manifest.stack_bytes} bytes of stack, {manifest.shared_bytes} of shared memory"
        rows.append((manifest.arch, f"{usage}, {memory}, NVRTC {manifest.nvrtc_version}, {manifest.created_at}"))
        rows.append(("", f"sha256 {manifest.cubin_sha256}"))
    first = found[0].manifest
    rows += [("spec", _spec(first)), ("parameters", _parameters(first))]
    console.print(fields_table(rows))


def _details(stored: Stored) -> list[tuple[str, object]]:
    manifest = stored.manifest
    rows: list[tuple[str, object]] = [
        (name, spell(value)) for name, value in manifest.to_dict().items() if not isinstance(value, dict | list)
    ]
    rows += [("options", " ".join(manifest.options)), ("parameters", _parameters(manifest)), ("spec", _spec(manifest))]
    rows += [("current", spell(stored.current) if stored.current else "no: made by other templates than today's")]
    return [*rows, ("verified", f"no: {stored.damage}" if stored.damage else "yes")]


def _spec(manifest: Manifest) -> str:
    return ", ".join(f"{field} {spell(value)}" for field, value in manifest.spec.items())


def _parameters(manifest: Manifest) -> str:
    parameters = manifest.launch.get("parameters")
    return ", ".join(str(pair[0]) for pair in parameters) if isinstance(parameters, tuple) else ""


def _digits(arch: str) -> str:
    return "".join(c for c in arch if c.isdigit()) or "0"
