"""KernelImage: what a cubin's own tables say of its kernel, without a disassembler."""

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from mlaprep.kernels_cache.elf import Section, read_sections
from mlaprep.kernels_cache.errors import ArtifactError

INSTRUCTION_BYTES: Final = 16

_SYMBOL: Final = struct.Struct("<IBBHQQ")
_FUNCTION: Final = 2  # STT_FUNC
# Attributes of .nv.info sections: a format byte, a kind byte, then 2 bytes, or 2 bytes of size and as many more.
_SIZED: Final = 0x04
_PARAM_CBANK: Final = 0x0A
_FRAME_SIZE: Final = 0x11
_REGCOUNT: Final = 0x2F


@dataclass(frozen=True, slots=True)
class Function:
    """A stretch of code under one name; ``start`` and ``end`` in bytes from the start of the kernel's section."""

    name: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class KernelImage:
    """One kernel in a cubin. Sizes are in bytes; registers and stack a thread, shared memory a block."""

    entry: str
    code: bytes
    functions: tuple[Function, ...]
    """The entry first, then what was not inlined into it."""
    registers: int
    stack_bytes: int
    """The largest frame of any of the functions."""
    shared_bytes: int
    constant_bytes: int
    """All constant banks, arguments and what the driver puts ahead of them included."""
    data_bytes: int
    """Global variables that the module brings."""
    arguments_at: int
    """Where the kernel's arguments start in constant bank 0."""
    argument_bytes: int


def read_kernel(cubin: bytes, entry: str | None = None) -> KernelImage:
    """The kernel of that name, or the only one.

    Raises:
        ArtifactError: bytes that are no whole cubin, without such a kernel, or with several and no name given.
    """
    listed = read_sections(cubin)
    sections = {section.name: section for section in listed}
    entries = [name.removeprefix(".nv.info.") for name in sections if name.startswith(".nv.info.")]
    if entry is None and len(entries) == 1:
        entry = entries[0]
    if entry is None or f".text.{entry}" not in sections:
        found = f"{len(entries)} kernels" if entry is None else f"no kernel {entry}"
        raise ArtifactError("no-kernel", f"a cubin with {found}; one was looked for")
    code = sections[f".text.{entry}"].data
    if not code or len(code) % INSTRUCTION_BYTES:
        raise ArtifactError("malformed-elf", f"{len(code)} bytes of code, no multiple of {INSTRUCTION_BYTES}")
    try:
        functions, numbers = _functions(listed, sections[".symtab"], sections[".strtab"], f".text.{entry}")
        module = list(_attributes(sections.get(".nv.info")))
        own = list(_attributes(sections.get(f".nv.info.{entry}")))
        registers = _per_symbol(module, _REGCOUNT)
        frames = _per_symbol(module, _FRAME_SIZE)
        arguments = next(data for kind, data in own if kind == _PARAM_CBANK)
        _, arguments_at, argument_bytes = struct.unpack("<IHH", arguments)
        return KernelImage(
            entry=entry,
            code=code,
            functions=functions,
            registers=registers[numbers[entry]],
            stack_bytes=max((frames.get(number, 0) for number in numbers.values()), default=0),
            shared_bytes=_sizes(sections, f".nv.shared.{entry}", exactly=True),
            constant_bytes=_sizes(sections, ".nv.constant"),
            data_bytes=_sizes(sections, ".nv.global"),
            arguments_at=arguments_at,
            argument_bytes=argument_bytes,
        )
    except (KeyError, StopIteration, ValueError, struct.error):
        raise ArtifactError("malformed-elf", f"a cubin whose tables on {entry} cannot be read") from None


def _functions(
    listed: Sequence[Section], symbols: Section, strings: Section, code: str
) -> tuple[tuple[Function, ...], dict[str, int]]:
    """Functions of a code section in order of their addresses, and the number of each one's symbol."""
    found, numbers = [], {}
    for number, symbol in enumerate(_SYMBOL.iter_unpack(symbols.data)):
        name_at, info, _, section, start, size = symbol
        if info & 0xF == _FUNCTION and section < len(listed) and listed[section].name == code:
            name = strings.data[name_at : strings.data.find(b"\0", name_at)].decode("ascii", "replace")
            found.append((start, start + size, name))
            numbers[name] = number
    # The size of the entry covers the functions behind it, so each ends where the next begins.
    found.sort(key=lambda function: (function[0], -function[1]))
    ends = [start for start, _, _ in found[1:]] + [max(end for _, end, _ in found)]
    return tuple(Function(name, start, end) for (start, _, name), end in zip(found, ends, strict=True)), numbers


def _attributes(section: Section | None) -> Iterator[tuple[int, bytes]]:
    """Kind and data of each attribute; raises struct.error where one is cut short."""
    data = b"" if section is None else section.data
    at = 0
    while at < len(data):
        form, kind, value = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == _SIZED:
            if at + value > len(data):
                raise struct.error
            yield kind, data[at : at + value]
            at += value
        else:
            yield kind, value.to_bytes(2, "little")


def _per_symbol(attributes: list[tuple[int, bytes]], wanted: int) -> dict[int, int]:
    return dict(struct.unpack("<II", data) for kind, data in attributes if kind == wanted)


def _sizes(sections: Mapping[str, Section], name: str, *, exactly: bool = False) -> int:
    return sum(s.size for s in sections.values() if s.name == name or (not exactly and s.name.startswith(name)))
