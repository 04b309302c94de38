"""Commands for bundles: kernels in one file, for machines without a network."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.text import Text

from mlaprep.clients.bundle_install import install_bundle
from mlaprep.clients.cli_kernels import bring, report
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
    named_cache_dir,
    open_store,
    select_archs,
    select_specs,
)
from mlaprep.clients.cli_output import (
    FULL_TABLE_WIDTH,
    ExitCode,
    kernel_document,
    kernel_table,
    print_json,
    reports_errors,
    stderr,
    stdout,
)
from mlaprep.clients.client import KernelClient
from mlaprep.clients.errors import FieldProblem, SpecError
from mlaprep.clients.pins import pinned_keys
from mlaprep.clients.wording import count
from mlaprep.kernels_cache.artifact import Manifest
from mlaprep.kernels_cache.bundle import Bundle, Finding, as_bundled, write_bundle
from mlaprep.kernels_cache.errors import ArtifactError, SigningError
from mlaprep.kernels_cache.key_files import read_signing_key
from mlaprep.kernels_cache.signing import SigningKey, split_signature
from mlaprep.kernels_cache.trust import TrustedKeys

app: Final = typer.Typer(help="Kernels in one file, for machines without a network.", no_args_is_help=True)

File = Annotated[Path, typer.Argument(help="A bundle.", show_default=False)]


@app.command()
@reports_errors
def create(
    output: Annotated[Path, typer.Option("--output", "-o", dir_okay=False, help="The bundle to write.")],
    presets: Presets = None,
    tps: Tps = None,
    variants: Variants = None,
    spec_file: SpecFile = None,
    overrides: Overrides = None,
    archs: Archs = None,
    sign_with: Annotated[
        Path | None,
        typer.Option("--sign-with", metavar="KEY", help="Sign every kernel with the private key in this file."),
    ] = None,
    url: Url = None,
    token: Token = None,
    cache_dir: CacheDir = None,
    as_json: Json = False,
) -> None:
    """Bundle kernels from the local cache, from the service where one is named, or compiled here. All or nothing."""
    specs = select_specs(presets, tps, variants, spec_file, overrides)
    if not output.absolute().parent.is_dir():  # before anything is compiled for it
        raise SpecError(FieldProblem("output", "a file in a folder that is not there", "a file in an existing folder"))
    key = None if sign_with is None else _signing_key(sign_with)
    with KernelClient(url, token=token, store=open_store(cache_dir)) as client:
        outcomes = bring(specs, select_archs(archs), client.obtain, "bundling", quiet=as_json)
    more: dict[str, Any] = {}
    if all(outcome.obtained is not None for outcome in outcomes):
        artifacts = [as_bundled(outcome.obtained.artifact, key) for outcome in outcomes if outcome.obtained]
        digest = write_bundle(output, artifacts)
        size = output.stat().st_size
        more["bundle"] = {"path": str(output), "kernels": len(artifacts), "bytes": size, "sha256": digest}
        more["bundle"]["key_id"] = None if key is None else key.public.key_id
    report(outcomes, as_json=as_json, more=more, url=url)
    if not as_json:
        signed = "" if key is None else f", signed by {key.public.key_id}"
        told = f"{output}: {count(len(artifacts), 'kernel')}, {count(size, 'byte')}{signed}\nsha256 {digest}"
        stderr().print(Text(told), soft_wrap=True)


@app.command()
@reports_errors
def verify(file: File, as_json: Json = False) -> None:
    """Read a bundle whole and prove every kernel in it; with keys pinned (MLAPREP_TRUSTED_KEYS) its signature too."""
    trusted = pinned_keys(None)
    findings = [_judged(finding, trusted) for finding in Bundle.open(file).verify()]
    bad = [finding for finding in findings if finding.damage]
    if as_json:
        kernels = [
            _document(finding.manifest, damage=finding.damage or None, member=finding.member or None)
            if finding.manifest is not None
            else finding.record.document() | {"damage": finding.damage, "member": finding.member}
            for finding in findings
        ]
        print_json({"bundle": _file_document(file, len(findings)), "kernels": kernels})
    else:
        notes = {finding.record.key: _word(finding) for finding in findings}
        _print_table([f.manifest for f in findings if f.manifest is not None], notes)
        for finding in bad:
            told = f"{finding.member}: {finding.damage}"
            stderr().print(Text.assemble((f"{_word(finding)} ", "bold red"), told), soft_wrap=True)
        pinned = "signatures checked" if trusted is not None else "no keys are pinned, so no signature was checked"
        good = len(findings) - len(bad)
        stdout().print(Text(f"{good} of {count(len(findings), 'kernel')} good; {pinned}", style="dim"))
    if bad:
        raise typer.Exit(ExitCode.FAILED)


@app.command()
@reports_errors
def show(file: File, as_json: Json = False) -> None:
    """List the kernels of a bundle and the keys that signed them. Reads manifests only; `verify` proves the rest."""
    manifests = list(Bundle.open(file).manifests())
    if as_json:
        kernels = [_document(manifest) for manifest in manifests]
        print_json({"bundle": _file_document(file, len(manifests)), "kernels": kernels})
        return
    _print_table(manifests, {manifest.key: _signer(manifest) or "nobody" for manifest in manifests}, "signed by")
    total = sum(manifest.cubin_size for manifest in manifests)
    stdout().print(Text(f"{count(len(manifests), 'kernel')}, {count(total, 'byte')} of cubin", style="dim"))


@app.command()
@reports_errors
def install(file: File, cache_dir: CacheDir = None, as_json: Json = False) -> None:
    """Put every kernel of a bundle into the local cache, once all are proved; with keys pinned, signatures too."""
    bundle = Bundle.open(file)
    installed = install_bundle(bundle, open_store(cache_dir), pinned_keys(None))
    if as_json:
        kernels = [_document(item.manifest, new=item.new, current=item.current) for item in installed]
        print_json({"kernels": kernels, "installed": sum(item.new for item in installed)})
        return
    notes = {
        item.manifest.key: ("new" if item.new else "there") + ("" if item.current else ", stale") for item in installed
    }
    _print_table([item.manifest for item in installed], notes)
    new = sum(item.new for item in installed)
    told = f"{count(len(installed), 'kernel')} in {named_cache_dir(cache_dir)}, {new} of them new"
    stdout().print(Text(told, style="dim"))
    if not all(item.current for item in installed):
        told = "stale: made by other templates than this release's, which therefore does not use them"
        stderr().print(Text(told), soft_wrap=True)


def _signing_key(path: Path) -> SigningKey:
    try:
        return read_signing_key(path)
    except SigningError as error:
        raise SigningError(f"--sign-with {path}: found {error}") from None


@dataclass(frozen=True, slots=True)
class _Untrusted(Finding):
    """A kernel that no pinned key vouches for; its bytes are what they should be."""


def _word(finding: Finding) -> str:
    if not finding.damage:
        return "ok"
    return "untrusted" if isinstance(finding, _Untrusted) else "damaged"


def _judged(finding: Finding, trusted: TrustedKeys | None) -> Finding:
    if trusted is None or finding.manifest is None or finding.damage:
        return finding
    try:
        trusted.require(finding.manifest)
    except ArtifactError as error:
        return _Untrusted(finding.record, finding.manifest, str(error), f"{finding.record.folder}/manifest.json")
    return finding


def _document(manifest: Manifest, **more: Any) -> dict[str, Any]:
    return kernel_document(manifest, signed_by=_signer(manifest), **more)


def _file_document(file: Path, kernels: int) -> dict[str, Any]:
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    return {"path": str(file), "kernels": kernels, "bytes": file.stat().st_size, "sha256": digest}


def _signer(manifest: Manifest) -> str | None:
    """The id of the key that a manifest says it is signed by; proves nothing."""
    try:
        return split_signature(manifest)[0]
    except ValueError:
        return None


def _print_table(manifests: Sequence[Manifest], notes: dict[str, str], noted: str = "") -> None:
    if not manifests:
        return
    console = stdout()
    figures = 1 if console.width < FULL_TABLE_WIDTH else 3
    console.print(kernel_table(manifests, notes, console.width, figures=figures, noted=noted))
