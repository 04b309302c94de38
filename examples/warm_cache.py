"""Fills a cache directory with every kernel of a model: for an image build, or a shared volume.

Needs NVRTC (the extra `cuda12` or `cuda13`), no GPU and no service. Workers that find the directory under
MLAPREP_CACHE_DIR then need neither a compiler nor the network.

    python examples/warm_cache.py ./kernels kimi-k3 deepseek-v3
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mlaprep.clients import KernelClient
from mlaprep.kernels_cache.disk import DiskStore
from mlaprep.templates.arch import DEFAULT_ARCHS
from mlaprep.templates.presets import preset


def main(folder: Path, models: list[str]) -> None:
    specs = {preset(model).spec(tp) for model in models for tp in preset(model).tp_degrees}
    wanted = [(spec, arch) for spec in specs for arch in DEFAULT_ARCHS]
    with KernelClient(store=DiskStore(folder), offline=True) as client, ThreadPoolExecutor() as pool:
        artifacts = list(pool.map(lambda job: client.artifact(*job), wanted))
        compiled = client.stats().compiled
    size = sum(len(artifact.cubin) for artifact in artifacts)
    print(f"{len(artifacts)} kernels, {compiled} of them compiled now, {size / 1024:.0f} KiB of cubins in {folder}")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("usage: warm_cache.py FOLDER MODEL [MODEL …]")
    main(Path(sys.argv[1]), sys.argv[2:])
