"""The air-gapped round to its end: a bundle made on one cache, installed on an empty one with no network, launched."""

import importlib.util
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import no_network
import pytest
import torch
from emulation.artifact import emulated_artifact
from kernel.calls import make
from kernel.checks import compare, expected, run
from kernel.devices import Emulation, Gpu, KernelDevice

from mlaprep.clients.bundle_install import install_bundle
from mlaprep.clients.client import KernelClient
from mlaprep.clients.errors import ArtifactRejected
from mlaprep.clients.handle import KernelHandle
from mlaprep.kernels_cache.artifact import KernelArtifact
from mlaprep.kernels_cache.bundle import Bundle, as_bundled, write_bundle
from mlaprep.kernels_cache.disk import DiskStore
from mlaprep.templates.spec import KernelSpec

SIGNED = importlib.util.find_spec("cryptography") is not None
"""A machine for GPU tests may lack it; the round is then gone unsigned."""


@dataclass(frozen=True)
class Loaded:
    """A device whose one handle is there already."""

    on: KernelDevice
    one: KernelHandle

    @property
    def device(self) -> torch.device:
        return self.on.device

    def handle(self, spec: KernelSpec) -> KernelHandle:
        return self.one

    def memory(self, inputs: Sequence[object], outputs: Sequence[object]) -> AbstractContextManager[None]:
        return self.on.memory(inputs, outputs)


def built(device: KernelDevice, spec: KernelSpec) -> KernelArtifact:
    return device.artifact(spec) if isinstance(device, Gpu) else emulated_artifact(spec)


@pytest.mark.parametrize("way", ["installed", "in-place"])
def test_a_bundled_kernel_runs_without_a_network(device: KernelDevice, tmp_path: Path, way: str) -> None:
    call = make(3)
    key = pins = stranger = None
    if SIGNED:
        from mlaprep.kernels_cache.key_files import generate_key

        key, stranger = generate_key(tmp_path / "signing.pem"), generate_key(tmp_path / "stranger.pem")
        pins = [key.public.text]
    there = DiskStore(tmp_path / "build")
    artifact = built(device, call.spec)
    there.publish(artifact)
    kept = there.get(artifact.key)
    assert kept is not None
    bundle = tmp_path / "kernels.tar"
    write_bundle(bundle, [as_bundled(kept, key)])

    with no_network.forbidden() as tried:
        store = DiskStore(tmp_path / "worker")
        bundles = [bundle]
        if way == "installed":
            install_bundle(Bundle.open(bundle), store)
            bundles = []
        client = KernelClient(store=store, offline=True, on_miss="error", trusted_keys=pins, bundles=bundles)
        obtained = client.obtain(call.spec, artifact.manifest.arch)
        assert obtained.tier == ("disk" if way == "installed" else "bundle")
        if isinstance(device, Emulation):
            handle = KernelHandle(obtained.artifact, device.driver).load(0)
        else:
            handle = client.load(call.spec, device=device.device)
        found = run(call, Loaded(device, handle), fused=True)  # type: ignore[arg-type]
    compare(found, expected(call), "the kernel out of the bundle")
    assert tried == []
    if stranger is not None:
        pins = [stranger.public.text]
        other = KernelClient(store=store, offline=True, on_miss="error", trusted_keys=pins, bundles=bundles)
        with pytest.raises(ArtifactRejected, match="not pinned"):
            other.load(call.spec, arch=artifact.manifest.arch)
