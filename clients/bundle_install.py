"""Installing a bundle: its kernels into a store, every one proved before the first is written."""

from dataclasses import dataclass

from mlaprep.kernels_cache.artifact import KernelArtifact, Manifest
from mlaprep.kernels_cache.bundle import Bundle
from mlaprep.kernels_cache.errors import ArtifactError, BundleError, StoreError
from mlaprep.kernels_cache.key import request_key
from mlaprep.kernels_cache.origin import require_own
from mlaprep.kernels_cache.store import KernelStore, MemoryStore, TieredStore
from mlaprep.kernels_cache.trust import TrustedKeys
from mlaprep.templates.errors import SpecError
from mlaprep.templates.render import render, templates_fingerprint
from mlaprep.templates.spec import KernelSpec


@dataclass(frozen=True, slots=True)
class Installed:
    """One kernel that is in the store now: whether it was not before, and whether this release uses it."""

    manifest: Manifest
    new: bool
    current: bool


def install_bundle(bundle: Bundle, store: KernelStore, trusted: TrustedKeys | None = None) -> list[Installed]:
    """Publish every kernel of a bundle, and link those that this release would ask for.

    Done twice it changes nothing. Each entry is put there whole or not at all; where the store cannot keep one,
    those before it stay.

    Raises:
        BundleError: a member is damaged, or signed by no key in ``trusted``; nothing was written.
        StoreError: the store keeps nothing beyond this process, or has not kept them all.
    """
    if isinstance(store, MemoryStore | TieredStore):
        raise StoreError("no directory to install into can be written; name one by --cache-dir or MLAPREP_CACHE_DIR")
    for finding in bundle.verify():
        if finding.damage or finding.manifest is None:
            raise BundleError(f"{bundle.path}: {finding.member}: {finding.damage}", member=finding.member)
        if trusted is not None:
            try:
                trusted.require(finding.manifest)
            except ArtifactError as error:
                member = f"{finding.record.folder}/manifest.json"
                raise BundleError(f"{bundle.path}: {member}: {error}", member=member) from error
    installed = []
    for record in bundle.records:
        artifact = bundle.read(record.key)
        before = store.get(record.key)
        store.publish(artifact)
        installed.append(Installed(artifact.manifest, before is None, _link(store, artifact)))
    lost = [item.manifest.key for item in installed if store.get(item.manifest.key) is None]
    if lost:
        raise StoreError(
            f"{len(lost)} of {len(installed)} kernels were not kept, {lost[0]} among them: the disk is full or "
            "read-only, or MLAPREP_CACHE_MAX_BYTES is too small for the bundle"
        )
    return installed


def _link(store: KernelStore, artifact: KernelArtifact) -> bool:
    """Have requests of this release lead to the kernel, if it is what they would compile."""
    manifest = artifact.manifest
    try:
        spec = KernelSpec.from_dict(manifest.spec)
        require_own(artifact, render(spec), manifest.arch)
    except (SpecError, ArtifactError):
        return False
    store.link(request_key(arch=manifest.arch, spec=spec.to_dict(), generator=templates_fingerprint()), manifest.key)
    return True
