"""Cubin: the ELF file that the CUDA driver loads, checked before a driver sees it."""

import struct
from dataclasses import dataclass
from typing import Final

from mlaprep.kernels_cache.errors import ArtifactError
from mlaprep.kernels_cache.key import is_arch

MACHINE_CUDA: Final = 190
MAX_CUBIN_BYTES: Final = 16 * 2**20

# e_version and e_entry are skipped: the first holds a toolkit's mark in CUDA files, not 1.
_HEADER: Final = struct.Struct("<4sBBBxB7xHH12xQQIHHHHHH")
_PROGRAM: Final = struct.Struct("<IIQQQQQQ")
_SECTION: Final = struct.Struct("<IIQQQQIIQQ")
_EXECUTABLE: Final = 2
_SECTIONS_WITHOUT_BYTES: Final = (0, 8)  # SHT_NULL, SHT_NOBITS


@dataclass(frozen=True, slots=True)
class Section:
    """One section of a cubin. ``data`` is empty where the file holds no bytes for it, as for shared memory."""

    name: str
    kind: int
    """``sh_type``."""
    size: int
    data: bytes


@dataclass(frozen=True, slots=True)
class _Elf:
    abi: int
    flags: int
    program_table: int
    program_table_end: int
    section_table: int
    section_table_end: int
    names: int
    """Index of the section that holds the sections' names."""


def check_cubin(cubin: bytes, arch: str) -> None:
    """Refuse bytes that are not a whole cubin for this architecture, such as ``sm_90a``.

    The suffix shows only in part: NVRTC 12.9 marks ``a`` cubins but not ``f`` ones, NVRTC 13 marks none
    (measured). So a mark must fit, a missing one proves nothing, and the manifest must tell those apart.

    Raises:
        ArtifactError: not a 64-bit little-endian ELF, not for CUDA, for another architecture, or one whose
            headers, sections and segments do not end exactly at its last byte.
    """
    elf = _read_header(cubin)
    _check_extent(cubin, elf)
    number, suffixes = _target(elf)
    if not is_arch(arch):
        raise ArtifactError("wrong-arch", "asked for an architecture that is not spelled like sm_90a")
    digits = arch[3:].rstrip("af")
    if number != int(digits) or arch[3 + len(digits) :] not in suffixes:
        found = f"sm_{number}{suffixes[0]}"
        raise ArtifactError("wrong-arch", f"a cubin for {arch} was asked for, this one is for {found}")


def complete_cubin(cubin: bytes) -> bytes:
    """A cubin as CuPy hands it out, made whole.

    CuPy 14.2 drops the last byte of a cubin as if it ended a string. That byte is the top of the last
    program header's alignment, which is zero. A cubin that is whole already comes back as it is.

    Raises:
        ArtifactError: any other kind of incomplete cubin, or bytes that are none.
    """
    elf = _read_header(cubin)
    if elf.program_table_end == len(cubin) + 1:
        cubin += b"\0"
    _check_extent(cubin, elf)
    return cubin


def read_sections(cubin: bytes) -> tuple[Section, ...]:
    """Every section of a whole cubin, in file order.

    Raises:
        ArtifactError: bytes that are no whole cubin, or whose section names cannot be read.
    """
    elf = _read_header(cubin)
    _check_extent(cubin, elf)
    headers = list(_SECTION.iter_unpack(cubin[elf.section_table : elf.section_table_end]))
    _, kind, _, _, offset, size, *_ = headers[elf.names]
    names = b"" if kind in _SECTIONS_WITHOUT_BYTES else cubin[offset : offset + size]
    sections = []
    for name, kind, _, _, offset, size, *_ in headers:
        end = names.find(b"\0", name)
        if end < 0:
            raise ArtifactError("malformed-elf", "a cubin with a section whose name cannot be read")
        data = b"" if kind in _SECTIONS_WITHOUT_BYTES else cubin[offset : offset + size]
        sections.append(Section(names[name:end].decode("ascii", "replace"), kind, size, data))
    return tuple(sections)


def cubin_target(cubin: bytes) -> tuple[int, tuple[str, ...]]:
    """What the header of a cubin says it is for: compute capability times ten, and the suffixes it may have.

    ``(90, ("a",))`` is sm_90a; several suffixes mean that the file does not tell.

    Raises:
        ArtifactError: bytes that are no cubin, or of an ELF ABI that this release does not read.
    """
    return _target(_read_header(cubin))


def _read_header(cubin: bytes) -> _Elf:
    if len(cubin) < _HEADER.size or cubin[:4] != b"\x7fELF":
        raise ArtifactError("not-elf", f"{len(cubin)} bytes that are no ELF file")
    if len(cubin) > MAX_CUBIN_BYTES:
        raise ArtifactError("malformed-elf", f"a cubin of {len(cubin)} bytes; the limit is {MAX_CUBIN_BYTES}")
    fields = _HEADER.unpack_from(cubin)
    _, bits, order, version, abi, kind, machine, program_table, section_table, flags = fields[:10]
    size, program_size, programs, section_size, sections, names = fields[10:]
    if (bits, order, version) != (2, 1, 1):
        raise ArtifactError("malformed-elf", "an ELF file that is not 64-bit little-endian")
    if machine != MACHINE_CUDA:
        raise ArtifactError("wrong-machine", f"an ELF file for machine {machine}; a cubin has {MACHINE_CUDA}")
    good_sizes = (size, program_size, section_size) == (_HEADER.size, _PROGRAM.size, _SECTION.size)
    if kind != _EXECUTABLE or not good_sizes or not programs or names >= sections:
        raise ArtifactError("malformed-elf", "a CUDA ELF file that is not an executable with both header tables")
    return _Elf(
        abi=abi,
        flags=flags,
        program_table=program_table,
        program_table_end=program_table + programs * _PROGRAM.size,
        section_table=section_table,
        section_table_end=section_table + sections * _SECTION.size,
        names=names,
    )


def _check_extent(cubin: bytes, elf: _Elf) -> None:
    """Everything the headers speak of lies inside, and something reaches the last byte."""
    ends = [elf.program_table_end, elf.section_table_end]
    if max(ends) <= len(cubin):
        programs = cubin[elf.program_table : elf.program_table_end]
        for _, _, offset, _, _, file_size, _, _ in _PROGRAM.iter_unpack(programs):
            ends.append(offset + file_size)
        sections = cubin[elf.section_table : elf.section_table_end]
        for _, kind, _, _, offset, size, *_ in _SECTION.iter_unpack(sections):
            if kind not in _SECTIONS_WITHOUT_BYTES:
                ends.append(offset + size)
    if max(ends) > len(cubin):
        raise ArtifactError("truncated", f"a cubin of {len(cubin)} bytes whose tables reach to {max(ends)}")
    if max(ends) < len(cubin):
        raise ArtifactError("trailing-bytes", f"a cubin that ends at {max(ends)} with {len(cubin)} bytes")


def _target(elf: _Elf) -> tuple[int, tuple[str, ...]]:
    """Compute capability times ten, and the suffixes that its architecture's name may have.

    Two encodings are met: NVRTC 12.9 writes ABI 7 up to sm_90 and ABI 8 from sm_100 on, NVRTC 13 ABI 8
    for all.
    """
    if elf.abi == 7:
        return elf.flags & 0xFF, ("a",) if elf.flags & 0x800 else ("", "f")
    if elf.abi == 8:
        return elf.flags >> 8 & 0xFF, ("a",) if elf.flags & 0x8 else ("", "f", "a")
    raise ArtifactError("unknown-abi", f"a cubin of ELF ABI version {elf.abi}; this release reads 7 and 8")
