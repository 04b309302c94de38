"""Saved builds: kernels in a folder of their own, as ``compile --save`` and ``fetch --output`` write them."""

from collections.abc import Iterator
from pathlib import Path

from mlaprep.kernels_cache.artifact import MAX_MANIFEST_BYTES, MAX_SOURCE_BYTES, KernelArtifact, Manifest
from mlaprep.kernels_cache.elf import MAX_CUBIN_BYTES
from mlaprep.kernels_cache.errors import ArtifactError

_CACHE_ENTRY = ("manifest.json", "kernel.cubin", "kernel.cu")


def read_build(folder: Path) -> list[KernelArtifact]:
    """Every kernel in a folder, verified: a saved build, or one entry of a kernel cache.

    Raises:
        ArtifactError: a kernel that is damaged, or none at all.
        OSError: a file that cannot be read.
    """
    artifacts = [_read(*files) for files in _files(folder)]
    if not artifacts:
        raise ArtifactError("no-kernel", f"{folder} holds no kernel with its manifest and source")
    return artifacts


def read_beside(cubin: Path) -> KernelArtifact | None:
    """The kernel of a cubin file, where its manifest and source stand beside it; errors as for :func:`read_build`."""
    files = next((files for files in _files(cubin.parent) if files[1] == cubin), None)
    return None if files is None else _read(*files)


def read_cubin(path: Path) -> bytes:
    """The bytes of a cubin, whatever stands beside it.

    Raises:
        ArtifactError: more bytes than a cubin may have.
        OSError: a file that cannot be read.
    """
    return _bytes(path, MAX_CUBIN_BYTES)


def _files(folder: Path) -> Iterator[tuple[Path, Path, Path]]:
    """Manifest, cubin and source of each kernel that has all three, by name."""
    entry = tuple(folder / name for name in _CACHE_ENTRY)
    saved = [
        (manifest, manifest.with_suffix(".cubin"), manifest.with_suffix(".cu"))
        for manifest in sorted(folder.glob("*.json"))
        if manifest != entry[0]
    ]
    for manifest, cubin, source in [(entry[0], entry[1], entry[2]), *saved]:
        if manifest.is_file() and cubin.is_file() and source.is_file():
            yield manifest, cubin, source


def _read(manifest: Path, cubin: Path, source: Path) -> KernelArtifact:
    try:
        text = _bytes(source, MAX_SOURCE_BYTES).decode()
    except UnicodeDecodeError:
        raise ArtifactError("source-digest", f"{source} is no UTF-8 text") from None
    document = Manifest.from_json(_bytes(manifest, MAX_MANIFEST_BYTES))
    artifact = KernelArtifact(document, read_cubin(cubin), text)
    artifact.verify()
    return artifact


def _bytes(path: Path, limit: int) -> bytes:
    with path.open("rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ArtifactError("malformed", f"{path} has more than {limit} bytes")
    return content
