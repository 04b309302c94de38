"""Every store against a plain dictionary: whatever is published, damaged, dropped and opened again, in any order."""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from cache.samples import make_artifact, synthetic_cubin
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mlaprep.kernels_cache.artifact import KernelArtifact
from mlaprep.kernels_cache.disk import DiskStore
from mlaprep.kernels_cache.revocation import Revocation, Revocations
from mlaprep.kernels_cache.store import KernelStore, MemoryStore, TieredStore

ARTIFACTS = tuple(make_artifact(f"// kernel {number}\n", arch) for number in range(4) for arch in ("sm_90a", "sm_100a"))
OTHERS = {artifact.key: other_cubin for artifact in ARTIFACTS for other_cubin in [
    make_artifact(artifact.source, artifact.manifest.arch, cubin=synthetic_cubin(artifact.manifest.arch, b"other"))
]}  # fmt: skip
REQUESTS = tuple(str(number) * 64 for number in range(3))
FILES = ("kernel.cubin", "manifest.json", "kernel.cu")
artifacts = st.sampled_from(ARTIFACTS)


class StoreModel(RuleBasedStateMachine):
    """``held`` has what must be found, ``links`` what a request was last linked to."""

    make: Callable[[Path], KernelStore]
    keeps = True
    """Whether a store that is opened again has what it had."""

    @initialize()
    def open(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="mlaprep-model-"))
        self.store = type(self).make(self.root / "cache")
        self.held: dict[str, KernelArtifact] = {}
        self.links: dict[str, str] = {}
        self.damages = 0

    @rule(artifact=artifacts)
    def publish(self, artifact: KernelArtifact) -> None:
        """After a look, as a builder does it: of several tiers the upper ones know only what they have read."""
        self.store.get(artifact.key)
        self.store.publish(artifact)
        self.held.setdefault(artifact.key, artifact)

    @rule(artifact=artifacts)
    def publish_other_bytes_under_the_key(self, artifact: KernelArtifact) -> None:
        other = OTHERS[artifact.key]
        self.store.get(other.key)
        self.store.publish(other)
        self.held.setdefault(artifact.key, other)

    @rule(artifact=artifacts)
    def get(self, artifact: KernelArtifact) -> None:
        assert self.store.get(artifact.key) == self.held.get(artifact.key)

    @rule(artifact=artifacts)
    def get_bytes(self, artifact: KernelArtifact) -> None:
        for candidate in (artifact, OTHERS[artifact.key]):
            known = any(held.digest == candidate.digest for held in self.held.values())
            assert self.store.get_blob(candidate.digest) == (candidate.cubin if known else None)

    @rule(artifact=artifacts)
    def delete(self, artifact: KernelArtifact) -> None:
        assert self.store.delete(artifact.key) == (self.held.pop(artifact.key, None) is not None)

    @rule(request=st.sampled_from(REQUESTS), artifact=artifacts)
    def link(self, request: str, artifact: KernelArtifact) -> None:
        self.store.link(request, artifact.key)
        self.links[request] = artifact.key

    @rule(request=st.sampled_from(REQUESTS))
    def resolve(self, request: str) -> None:
        """A link is a hint: it may be gone where its kernel is, and never leads elsewhere."""
        key = self.store.resolve(request)
        wanted = self.links.get(request)
        assert key == wanted or (key is None and wanted not in self.held)

    @rule(artifact=artifacts)
    def find_by_prefix(self, artifact: KernelArtifact) -> None:
        assert self.store.find(artifact.key) == (artifact.key if artifact.key in self.held else None)

    @rule()
    def open_again(self) -> None:
        if self.keeps:
            self.store = type(self).make(self.root / "cache")

    @invariant()
    def everything_is_listed(self) -> None:
        if not hasattr(self, "store"):
            return
        listed = {manifest.key: manifest.cubin_sha256 for manifest in self.store.list()}
        assert listed == {key: artifact.digest for key, artifact in self.held.items()}
        assert self.store.stats().entries == len(self.held)
        assert self.store.stats().write_errors == 0

    def teardown(self) -> None:
        if hasattr(self, "root"):
            assert not list(self.root.glob("cache/tmp/*"))
            shutil.rmtree(self.root)


class MemoryModel(StoreModel):
    make = staticmethod(lambda path: MemoryStore())
    keeps = False


class DiskModel(StoreModel):
    make = staticmethod(lambda path: DiskStore(path))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        """Bytes flipped or cut off in one file: that kernel is lost, no other is."""
        artifact = self.held.pop(data.draw(st.sampled_from(sorted(self.held))))
        name = data.draw(st.sampled_from(FILES))
        path = self.entry(artifact) / name
        content = path.read_bytes()
        at = data.draw(st.integers(0, len(content) - 1))
        cut = data.draw(st.booleans())
        path.write_bytes(content[:at] if cut else content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :])
        before = self.store.stats().damaged
        assert self.store.get(artifact.key) is None
        assert self.store.stats().damaged == before + 1

    @rule(artifact=artifacts)
    def lose_the_hints(self, artifact: KernelArtifact) -> None:
        """Blob records are hints; a read by key writes them again."""
        if artifact.key in self.held:
            shutil.rmtree(self.root / "cache" / "blobs", ignore_errors=True)
            for held in self.held.values():
                assert self.store.get(held.key) == held

    @rule()
    def evict_everything(self) -> None:
        store = DiskStore(self.root / "cache")
        assert store.gc(max_bytes=0) == len(self.held)
        self.held.clear()
        self.links.clear()

    @rule(artifact=artifacts)
    def revoke(self, artifact: KernelArtifact) -> None:
        """As a service does it: noted first, then removed; the note outlives the entry and eviction."""
        held = self.held.pop(artifact.key, None)
        if held is None:
            return
        told = {"key": held.key, "digest": held.digest, "arch": held.manifest.arch, "reason": "wrong rows"}
        told |= {"variant_id": held.manifest.variant_id, "revoked_at": "2026-01-01T00:00:00Z"}
        Revocations(self.root / "cache").add(Revocation.from_dict(told))
        assert self.store.delete(held.key)
        assert Revocations(self.root / "cache").find(key=held.key) is not None
        assert Revocations(self.root / "cache").find(digest=held.digest) is not None

    def entry(self, artifact: KernelArtifact) -> Path:
        return self.root / "cache" / artifact.manifest.arch / artifact.key[:2] / artifact.key


class TiersModel(StoreModel):
    """Memory above disk; the memory is lost at every opening, and dropped as it likes."""

    make = staticmethod(lambda path: TieredStore([MemoryStore(max_bytes=2500), DiskStore(path)]))


for model in (MemoryModel, DiskModel, TiersModel):
    model.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)

TestMemory = MemoryModel.TestCase
TestDisk = DiskModel.TestCase
TestTiers = TiersModel.TestCase
