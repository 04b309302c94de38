"""Fetch what the benchmarks compare with into ``.peers/``, which git ignores: SGLang's and FlashInfer's kernel sources,
and tvm-ffi.

    python benchmarks/fetch_peers.py                                   for this machine
    python benchmarks/fetch_peers.py --python 3.12 --build 9.0         for a GPU machine that has no network:
                                                                       carry .peers/ there

Released packages only, through pip; of each, the few files that its prepare kernels need. Wheels that are already
here are taken from ``--wheels``.
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import peer_flashinfer
import peer_sglang
from peer_flashinfer import build_flashinfer, find_flashinfer
from peer_sglang import SCATTER_EXPORT, build_sglang, find_sglang, fused_export
from peers import PEERS, PeerMissing, find_tvm_ffi

SGLANG = "sglang==0.5.23"
FLASHINFER = "flashinfer-python==0.7.2.post1"
TVM_FFI = "apache-tvm-ffi==0.1.15.post2"
_KEPT_OF_SGLANG = tuple(
    f"sglang/kernels/{path}"
    for path in (
        peer_sglang.KERNEL,
        peer_sglang.SCATTER,
        peer_sglang.HEADERS + "/",
        peer_sglang.WRAPPER,
        peer_sglang.HELPERS,
    )
)
_DROPPED_OF_TVM_FFI = ("tvm_ffi/cython/", "tvm_ffi/src/", "tvm_ffi/testing/", "tvm_ffi/share/")


def main() -> int:
    parser = argparse.ArgumentParser(description="Fetch SGLang's and FlashInfer's kernel sources, and tvm-ffi.")
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser.add_argument(
        "--python", default=here, help="Python version that will run the benchmark (default: %(default)s)"
    )
    parser.add_argument(
        "--build", metavar="MAJOR.MINOR", help="also build for this compute capability; needs nvcc, no GPU"
    )
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="look for the wheels here before fetching them")
    args = parser.parse_args()

    PEERS.mkdir(exist_ok=True)
    tag = f"cp{args.python.replace('.', '')}"
    record = {}
    with tempfile.TemporaryDirectory() as folder:
        for requirement, python, target, wanted in (
            # Sources are the same in the wheel of every Python.
            (SGLANG, None, PEERS, lambda name: name.startswith(_KEPT_OF_SGLANG)),
            (FLASHINFER, None, PEERS, _kept_of_flashinfer),
            (TVM_FFI, args.python, PEERS / f"site-{tag}", lambda name: not name.startswith(_DROPPED_OF_TVM_FFI)),
        ):
            wheel = _here(requirement, args.wheels, tag if python else "") or _download(
                requirement, Path(folder), python
            )
            _unpack(wheel, target, wanted)
            record[wheel.name] = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (PEERS / "peers.json").write_text(json.dumps(record, indent=2) + "\n")
    print(*(f"{digest}  {name}" for name, digest in record.items()), sep="\n")

    if args.build:
        major, minor = map(int, args.build.split("."))
        try:
            for library in _build((major, minor), tag):
                print(f"{library.stat().st_size:>8} bytes  {library.name}")
        except PeerMissing as error:
            print(f"not built: {error}", file=sys.stderr)
            return 1
    return 0


def _kept_of_flashinfer(name: str) -> bool:
    data = "flashinfer/data/"
    folder, _, file = name.rpartition("/")
    return (
        (folder == f"{data}csrc" and file in peer_flashinfer.CSRC)
        or folder == f"{data}{peer_flashinfer.INCLUDE}"
        or name.startswith(f"{data}{peer_flashinfer.CCCL}/")
    )


def _build(capability: tuple[int, int], tag: str) -> Iterator[Path]:
    sglang, tvm_ffi = find_sglang(PEERS), find_tvm_ffi(tag)
    for pdl in (True, False):
        yield build_sglang(sglang, tvm_ffi, peer_sglang.KERNEL, [fused_export(pdl)], capability)
    yield build_sglang(sglang, tvm_ffi, peer_sglang.SCATTER, [SCATTER_EXPORT], capability)
    yield build_flashinfer(find_flashinfer(PEERS), tvm_ffi, capability)


def _here(requirement: str, folder: Path | None, tag: str) -> Path | None:
    package, _, version = requirement.partition("==")
    wheels = folder.glob(f"{package.replace('-', '_')}-{version}-*.whl") if folder else ()
    return next((wheel for wheel in sorted(wheels) if tag in wheel.name), None)


def _download(requirement: str, folder: Path, python: str | None) -> Path:
    package = requirement.partition("==")[0].replace("-", "_")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
    if python is not None:
        command += ["--python-version", python, "--implementation", "cp"]
        for glibc in ("2_34", "2_28", "2_24", "2_17"):
            command += ["--platform", f"manylinux_{glibc}_x86_64"]
    subprocess.run([*command, requirement], check=True)
    (wheel,) = folder.glob(f"{package}-*.whl")
    return wheel


def _unpack(wheel: Path, target: Path, wanted: Callable[[str], bool]) -> None:
    """The wanted files of a wheel, and its metadata, in place of what an earlier one left."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        names = [name for name in names if wanted(name) or name.endswith(".dist-info/METADATA")]
        for name in {Path(name).parts[0] for name in names}:
            shutil.rmtree(target / name, ignore_errors=True)
        archive.extractall(target, names)


if __name__ == "__main__":
    sys.exit(main())
