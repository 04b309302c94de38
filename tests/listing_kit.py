"""A store of manifests alone, for tests that list many."""

import time
from collections.abc import Iterator

from cache.samples import make_artifact

from mlaprep.kernels_cache.artifact import Manifest
from mlaprep.kernels_cache.store import MemoryStore
from mlaprep.templates.spec import KernelSpec


class Listed(MemoryStore):
    """A store that holds manifests only, and counts and slows down each look at them."""

    def __init__(self, manifests: list[Manifest], pause_s: float = 0.0) -> None:
        super().__init__()
        self.manifests, self.pause_s, self.looks, self.at_once, self.most = manifests, pause_s, 0, 0, 0

    def list(self, arch: str | None = None) -> Iterator[Manifest]:
        self.looks += 1
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        time.sleep(self.pause_s)
        self.at_once -= 1
        return iter(list(self.manifests))


def manifests_of(count: int) -> list[Manifest]:
    """Of so many variants, which differ in a constant stride."""
    template = make_artifact(arch="sm_100a").manifest.to_dict()
    made = []
    for number in range(count):
        spec = KernelSpec(num_heads=1 + number % 100, out_token_stride=65536 + 16 * number)
        changes = {"spec": spec.to_dict(), "variant_id": spec.variant_id, "key": f"{number:064x}"}
        made.append(Manifest.from_dict(template | changes))
    return made
