"""Kernels for machines without a network: built and signed here, carried over as one file, installed there, checked.

Needs NVRTC (the extra `cuda12` or `cuda13`) and `cryptography` where the bundle is made; a worker needs neither NVRTC
nor a network. Both parts run here, the second one offline, over an empty cache and with the signing key pinned. With
a GPU the kernel is loaded as well.

    python examples/air_gapped.py ./air-gapped
"""

import os
import subprocess
import sys
from pathlib import Path

from mlaprep.clients import KernelClient
from mlaprep.clients.errors import DriverError
from mlaprep.templates.presets import preset

KERNELS = ["--preset", "kimi-k3", "--tp", "8", "--arch", "sm_90a", "--arch", "sm_100a"]


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    public_key, bundle = build(folder)
    # What is carried over: the bundle by any way, the public key by one that is trusted.
    os.environ |= {"MLAPREP_OFFLINE": "1", "MLAPREP_TRUSTED_KEYS": public_key}
    os.environ["MLAPREP_CACHE_DIR"] = str(folder / "worker")
    mlaprep("bundle", "verify", bundle)
    mlaprep("bundle", "install", bundle)
    work("disk")
    # Or without installing: straight from the file.
    os.environ |= {"MLAPREP_CACHE_DIR": str(folder / "another-worker"), "MLAPREP_BUNDLE": str(bundle)}
    work("bundle")


def build(folder: Path) -> tuple[str, Path]:
    """On the machine that builds: a key, made once, and a signed bundle. Returns the public key and the file."""
    key, bundle = folder / "signing.pem", folder / "kernels.tar"
    if not key.exists():
        mlaprep("keys", "generate", key)
    public_key = mlaprep("keys", "show", key).strip()
    mlaprep("bundle", "create", *KERNELS, "--sign-with", key, "--cache-dir", folder / "build", "-o", bundle)
    return public_key, bundle


def work(tier: str) -> None:
    """On a worker: the kernel from the cache or the bundle, refused unless the pinned key signed it."""
    spec = preset("kimi-k3").spec(8)
    with KernelClient(on_miss="error") as client:
        obtained = client.obtain(spec, "sm_90a")
        assert (obtained.tier, client.offline) == (tier, True)
        try:
            loaded = f"loaded on a GPU: {client.load(spec)!r}"
        except DriverError:
            loaded = "no GPU here to load it on"
    print(f"{spec.variant_id} from {obtained.tier}, {obtained.artifact.manifest.signature}; {loaded}")


def mlaprep(*arguments: object) -> str:
    command = [sys.executable, "-m", "mlaprep.clients.cli", *map(str, arguments)]
    print("$ mlaprep", *arguments)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    print(done.stdout, end="")
    return done.stdout


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: air_gapped.py FOLDER")
    main(Path(sys.argv[1]))
