"""Disassembler: machine code to instructions, through the nvdisasm of a wheel or of a CUDA toolkit.

nvdisasm gets bare code, never an ELF file: it takes 0.3 s of a core to start and next to nothing for a kernel,
so the code of many kernels goes through one process, and its ELF reader sees nothing that came from elsewhere.
"""

import functools
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from mlaprep.service.cubin import INSTRUCTION_BYTES
from mlaprep.service.errors import DisassemblerUnavailable, DisassemblyFailed
from mlaprep.service.sass import Instruction
from mlaprep.templates.arch import Arch

DEFAULT_TIMEOUT_S: Final = 30.0

_WHEEL: Final = "nvidia-cuda-nvdisasm"
_TOOL: Final = "nvdisasm"
_FILE: Final = "code"
_VERSION: Final = re.compile(r"\bV([0-9]+(?:\.[0-9]+)+)\b")
_ADDRESS: Final = re.compile(r"0x[0-9a-f]{1,8}")


def find_nvdisasm() -> Path:
    """nvdisasm of the installed wheel, else the one on PATH.

    Raises:
        DisassemblerUnavailable: neither is there.
    """
    for path in (*_wheel_files(), shutil.which(_TOOL)):
        if path is not None and os.access(path, os.X_OK):
            return Path(path)
    raise DisassemblerUnavailable(f"{_TOOL} is not installed")


def disassemble(
    codes: Sequence[bytes], arch: Arch, *, timeout_s: float = DEFAULT_TIMEOUT_S
) -> tuple[tuple[Instruction, ...], ...]:
    """The instructions of each code, all in one process; addresses and targets count from the code's start.

    Raises:
        DisassemblerUnavailable: nvdisasm is missing or does not start.
        DisassemblyFailed: it refused the code, did not end in time, or its output cannot be read.
    """
    if not codes:
        return ()
    options = ["--binary", arch.name.replace("sm_", "SM"), "-json", _FILE]
    printed = _run(find_nvdisasm(), options, b"".join(codes), timeout_s)
    try:
        _, functions = json.loads(printed)
        listed = [item for function in functions for item in function["sass-instructions"]]
        if len(listed) * INSTRUCTION_BYTES != sum(map(len, codes)):
            raise ValueError
        result, taken = [], 0
        for code in codes:
            count = len(code) // INSTRUCTION_BYTES
            result.append(tuple(_instructions(listed[taken : taken + count], taken * INSTRUCTION_BYTES)))
            taken += count
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise DisassemblyFailed(f"{_TOOL} gave a listing that cannot be read; use that of CUDA 13 or later") from None
    return tuple(result)


def nvdisasm_version() -> str:
    """Version of the nvdisasm in use, e.g. ``13.5.37``; errors as for :func:`disassemble`."""
    return _version(find_nvdisasm())


@functools.lru_cache(maxsize=8)
def _version(tool: Path) -> str:
    found = _VERSION.search(_run(tool, ["--version"], b"", DEFAULT_TIMEOUT_S).decode(errors="replace"))
    return found[1] if found else "unknown"


def _wheel_files() -> Iterator[str]:
    try:
        files = importlib.metadata.distribution(_WHEEL).files or []
    except importlib.metadata.PackageNotFoundError:
        return
    yield from (str(file.locate()) for file in files if file.name == _TOOL)


def _run(tool: Path, options: Sequence[str], code: bytes, timeout_s: float) -> bytes:
    """What nvdisasm prints, told to read a file ``code`` if at all."""
    with tempfile.TemporaryDirectory(prefix="mlaprep-sass-") as folder:
        (Path(folder) / _FILE).write_bytes(code)
        command = [str(tool), *options]
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env={},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise DisassemblyFailed(f"{_TOOL} passed its deadline of {timeout_s:g} s and was killed") from None
        except OSError as error:
            raise DisassemblerUnavailable(f"{tool} does not start ({error.strerror})") from None
    if done.returncode:
        said = " ".join(done.stderr.decode(errors="replace").split()) or f"exit status {done.returncode}"
        raise DisassemblyFailed(f"{_TOOL} refused the code: {said[:300]}")
    return done.stdout


def _instructions(listed: Sequence[dict[str, Any]], base: int) -> Iterator[Instruction]:
    for number, item in enumerate(listed):
        operands = tuple(operand.strip() for operand in item.get("operands", "").split(",") if operand.strip())
        target = None
        # A return shows the function it goes back to, which is no place in it.
        if item["opcode"].startswith("RET"):
            operands = operands[:1]
        elif item.get("other-attributes", {}).get("control-flow") and operands and _ADDRESS.fullmatch(operands[-1]):
            target = int(operands[-1], 16) - base
            operands = (*operands[:-1], f"{target:#x}")
        yield Instruction(number * INSTRUCTION_BYTES, item.get("predicate", ""), item["opcode"], operands, target)
