"""Fetch what the benchmarks compare with into ``.peers/``, which git ignores: SGLang's kernel sources and tvm-ffi.

    python benchmarks/fetch_peers.py                                   for this machine
    python benchmarks/fetch_peers.py --python 3.12 --build 9.0         for a GPU machine that has no network:
                                                                       carry .peers/ there

Released packages only, through pip; of SGLang's, the few files that its fused prepare kernel needs.
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from peers import HEADERS, HELPERS, KERNEL, PEERS, WRAPPER, PeerMissing, build, find_sglang, find_tvm_ffi

SGLANG = "sglang==0.5.23"
TVM_FFI = "apache-tvm-ffi==0.1.15.post2"
_KEPT_OF_SGLANG = tuple(f"sglang/kernels/{path}" for path in (KERNEL, HEADERS + "/", WRAPPER, HELPERS))
_DROPPED_OF_TVM_FFI = ("tvm_ffi/cython/", "tvm_ffi/src/", "tvm_ffi/testing/", "tvm_ffi/share/")


def main() -> int:
    parser = argparse.ArgumentParser(description="Fetch SGLang's kernel sources and tvm-ffi into .peers/.")
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser.add_argument(
        "--python", default=here, help="Python version that will run the benchmark (default: %(default)s)"
    )
    parser.add_argument(
        "--build", metavar="MAJOR.MINOR", help="also build for this compute capability; needs nvcc, no GPU"
    )
    args = parser.parse_args()

    PEERS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        # Sources are the same in the wheel of every Python.
        sglang = _download(SGLANG, Path(folder, "sglang"), None)
        _unpack(sglang, PEERS, lambda name: name.startswith(_KEPT_OF_SGLANG) or name.endswith(".dist-info/METADATA"))
        tvm_ffi = _download(TVM_FFI, Path(folder, "tvm-ffi"), args.python)
        tag = f"cp{args.python.replace('.', '')}"
        _unpack(tvm_ffi, PEERS / f"site-{tag}", lambda name: not name.startswith(_DROPPED_OF_TVM_FFI))
        record = {wheel.name: hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in (sglang, tvm_ffi)}
    (PEERS / "peers.json").write_text(json.dumps(record, indent=2) + "\n")
    print(*(f"{digest}  {name}" for name, digest in record.items()), sep="\n")

    if args.build:
        major, minor = map(int, args.build.split("."))
        for pdl in ("true", "false"):
            export = ("set_mla_kv_concat_q_fp8", f"SetMlaKVConcatQFp8Kernel<{pdl}>::run")
            try:
                library = build(find_sglang(PEERS), find_tvm_ffi(tag), [export], (major, minor))
            except PeerMissing as error:
                print(f"not built: {error}", file=sys.stderr)
                return 1
            print(f"{library.stat().st_size:>8} bytes  {library.name}")
    return 0


def _download(requirement: str, folder: Path, python: str | None) -> Path:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
    if python is not None:
        command += ["--python-version", python, "--implementation", "cp"]
        for glibc in ("2_34", "2_28", "2_24", "2_17"):
            command += ["--platform", f"manylinux_{glibc}_x86_64"]
    subprocess.run([*command, requirement], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def _unpack(wheel: Path, target: Path, wanted: Callable[[str], bool]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if wanted(name) and not name.endswith("/")]
        for name in {Path(name).parts[0] for name in names}:
            shutil.rmtree(target / name, ignore_errors=True)
        archive.extractall(target, names)


if __name__ == "__main__":
    sys.exit(main())
