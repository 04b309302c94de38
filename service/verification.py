"""Verification: rebuild stored kernels and compare the bytes."""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, Literal

from mlaprep.kernels_cache.artifact import KernelArtifact, Manifest
from mlaprep.kernels_cache.audit import Finding
from mlaprep.service.compiler import Compiler
from mlaprep.service.errors import BuildError, CompilerUnavailable
from mlaprep.service.toolchain import compile_options
from mlaprep.templates.arch import Arch
from mlaprep.templates.errors import SpecError
from mlaprep.templates.render import KernelSource, check_target, render
from mlaprep.templates.spec import KernelSpec

Outcome = Literal["same", "explained", "differs", "damaged", "failed"]
"""``explained``: other bytes from other inputs. ``differs``: others from the same inputs, which must not happen."""

_AHEAD: Final = 4  # jobs a process, so that none waits for this one to read


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of rebuilding one stored kernel."""

    arch: str
    key: str
    variant_id: str
    """Empty where the entry cannot be read."""
    outcome: Outcome
    reasons: tuple[str, ...] = ()
    """Why, in words: the inputs that differ, the damage, or why there is nothing to compare with."""
    digest: str = ""
    rebuilt: str = ""
    """Digest of what was built now."""

    @property
    def good(self) -> bool:
        """Whether the stored bytes are those that their inputs give, as far as can be told here."""
        return self.outcome in ("same", "explained")

    def to_dict(self) -> dict[str, Any]:
        """JSON types only."""
        return {
            "arch": self.arch,
            "key": self.key,
            "variant_id": self.variant_id,
            "outcome": self.outcome,
            "reasons": list(self.reasons),
            "digest": self.digest or None,
            "rebuilt": self.rebuilt or None,
        }


@dataclass(frozen=True, slots=True)
class _Rebuild:
    """A compile on its way, for one entry."""

    manifest: Manifest
    source: KernelSource
    arch: Arch
    future: "Future[KernelArtifact]"


def verify_builds(findings: Iterable[Finding], compiler: Compiler) -> Iterator[Verdict]:
    """Compile each entry's variant anew, past every cache, and compare; in order, as results come.

    Today's templates and this NVRTC are what is compared with. An entry that another source or another NVRTC
    made may have other bytes, and says so; one of the same inputs must not.

    Raises:
        CompilerUnavailable: there is no compiler.
    """
    version = compiler.version()
    waiting: deque[_Rebuild | Verdict] = deque()
    for finding in findings:
        waiting.append(_begin(finding, compiler))
        if len(waiting) > compiler.processes * _AHEAD:
            yield _settle(waiting.popleft(), version)
    while waiting:
        yield _settle(waiting.popleft(), version)


def _begin(finding: Finding, compiler: Compiler) -> _Rebuild | Verdict:
    manifest = finding.manifest
    name = "" if manifest is None else manifest.variant_id
    if manifest is None or finding.damage:
        return Verdict(finding.arch, finding.key, name, "damaged", (finding.damage,))
    try:
        spec, arch = KernelSpec.from_dict(manifest.spec), Arch(manifest.arch)
        check_target(spec, arch)
        source = render(spec)
    except SpecError as error:
        return _verdict(manifest, "explained", f"a spec of another release, which cannot be rebuilt: {error}")
    try:
        return _Rebuild(manifest, source, arch, compiler.submit(source, arch))
    except BuildError as error:
        return _verdict(manifest, "failed", str(error))


def _settle(rebuild: _Rebuild | Verdict, version: str) -> Verdict:
    if isinstance(rebuild, Verdict):
        return rebuild
    manifest = rebuild.manifest
    reasons = tuple(_other_inputs(rebuild, version))
    try:
        made = rebuild.future.result()
    except CompilerUnavailable:
        raise
    except (BuildError, SpecError) as error:
        return _verdict(manifest, "failed", *reasons, str(error))
    if made.digest == manifest.cubin_sha256:
        return _verdict(manifest, "same", *reasons, rebuilt=made.digest)
    if reasons:
        return _verdict(manifest, "explained", *reasons, rebuilt=made.digest)
    told = f"the same source, options and NVRTC gave {len(made.cubin):,} other bytes"
    return _verdict(manifest, "differs", told, rebuilt=made.digest)


def _other_inputs(rebuild: _Rebuild, version: str) -> Iterator[str]:
    manifest = rebuild.manifest
    if manifest.nvrtc_version != version:
        yield f"NVRTC {manifest.nvrtc_version}, here {version}"
    if manifest.source_sha256 != rebuild.source.sha256:
        yield "another source than today's templates give"
    if tuple(manifest.options) != tuple(compile_options(rebuild.arch)):
        yield "other compile options"


def _verdict(manifest: Manifest, outcome: Outcome, *reasons: str, rebuilt: str = "") -> Verdict:
    return Verdict(manifest.arch, manifest.key, manifest.variant_id, outcome, reasons, manifest.cubin_sha256, rebuilt)
