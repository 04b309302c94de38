"""Inspection: what a kernel was compiled to, and how two builds differ."""

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from mlaprep.kernels_cache.artifact import KernelArtifact, Manifest
from mlaprep.kernels_cache.elf import cubin_target
from mlaprep.kernels_cache.errors import ArtifactError
from mlaprep.service.cubin import KernelImage, read_kernel
from mlaprep.service.disassembler import DEFAULT_TIMEOUT_S, disassemble
from mlaprep.service.sass import Listing
from mlaprep.templates.arch import Arch
from mlaprep.templates.errors import SpecError

_ARGUMENT_BYTES: Final[Mapping[object, int]] = {"pointer": 8, "i64": 8, "u32": 4}


@dataclass(frozen=True, slots=True)
class Resources:
    """What a kernel takes. Registers and stack a thread, shared memory a block, sizes in bytes.

    All of it is read off the cubin, except spills, which only the compiler's log tells: None without a manifest.
    """

    registers: int
    stack_bytes: int
    spill_stores: int | None
    spill_loads: int | None
    shared_bytes: int
    constant_bytes: int
    data_bytes: int
    code_bytes: int
    instructions: int
    """Without what pads the end of the code."""
    kinds: Mapping[str, int]
    """Instructions by class, those that there are."""

    def figures(self) -> dict[str, int | None]:
        """Everything but the classes, by name."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "kinds"}

    def to_dict(self) -> dict[str, Any]:
        """JSON types only."""
        return self.figures() | {"kinds": dict(self.kinds)}


@dataclass(frozen=True, slots=True)
class Inspection:
    """One kernel with its resources and its machine code."""

    name: str
    """Variant id, or what the bytes were called that came without one."""
    arch: Arch
    resources: Resources
    listing: Listing


@dataclass(frozen=True, slots=True)
class Difference:
    """How one build became another. Empty members mean that the two agree there."""

    one: str
    other: str
    figures: Mapping[str, tuple[int | None, int | None]]
    """Resources that changed."""
    opcodes: Mapping[str, tuple[int, int]]
    """Opcodes that come more or less often, most changed first."""
    sass: tuple[str, ...]
    """The listings as a unified diff."""

    @property
    def empty(self) -> bool:
        return not (self.figures or self.opcodes or self.sass)

    def to_dict(self) -> dict[str, Any]:
        """JSON types only; pairs are before and after."""
        return {
            "one": self.one,
            "other": self.other,
            "figures": {name: list(pair) for name, pair in self.figures.items()},
            "opcodes": {name: list(pair) for name, pair in self.opcodes.items()},
            "sass": list(self.sass),
        }


def inspect(artifact: KernelArtifact, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Inspection:
    """A kernel taken apart.

    Raises:
        ArtifactError: a cubin that is not whole.
        DisassemblerUnavailable, DisassemblyFailed: see :func:`mlaprep.service.disassembler.disassemble`.
    """
    return inspect_all([artifact], timeout_s=timeout_s)[0]


def inspect_all(artifacts: Iterable[KernelArtifact], *, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[Inspection]:
    """As :func:`inspect`, in order, with one disassembler process an architecture however many kernels there are."""
    listed = [(_image_of(artifact), Arch(artifact.manifest.arch), artifact.manifest) for artifact in artifacts]
    found: dict[int, Inspection] = {}
    for arch in dict.fromkeys(arch for _, arch, _ in listed):
        group = [number for number, (_, its, _) in enumerate(listed) if its == arch]
        codes = disassemble([listed[number][0].code for number in group], arch, timeout_s=timeout_s)
        for number, instructions in zip(group, codes, strict=True):
            image, _, manifest = listed[number]
            listing = Listing(image.functions, instructions, tuple(_arguments(manifest, image.arguments_at)))
            found[number] = Inspection(manifest.variant_id, arch, _resources(image, listing, manifest), listing)
    return [found[number] for number in range(len(listed))]


def inspect_cubin(cubin: bytes, name: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Inspection:
    """A cubin without a manifest: its target comes from its header. Errors as for :func:`inspect`."""
    image, arch = read_kernel(cubin), arch_of(cubin)
    (instructions,) = disassemble([image.code], arch, timeout_s=timeout_s)
    listing = Listing(image.functions, instructions)
    return Inspection(name, arch, _resources(image, listing, None), listing)


def sass(artifact: KernelArtifact) -> Listing:
    """The machine code of a kernel; errors as for :func:`inspect`."""
    return inspect(artifact).listing


def resources(artifact: KernelArtifact) -> Resources:
    """What a kernel takes; errors as for :func:`inspect`."""
    return inspect(artifact).resources


def diff(one: Inspection, other: Inspection, *, registers: bool = False, context: int = 3) -> Difference:
    """How ``one`` became ``other``.

    Instructions are aligned without their addresses, with arguments by name. Register numbers are left out too,
    since one more value renumbers most of a kernel; ``registers`` counts them. What only one side knows, as
    the names of arguments and spills beside a cubin without a manifest, is no difference.
    """
    before, after = one.resources.figures(), other.resources.figures()
    figures = {
        name: (before[name], after[name])
        for name in before
        if before[name] != after[name] and None not in (before[name], after[name])
    }
    less, more = one.listing.opcodes(), other.listing.opcodes()
    changed = [name for name in less | more if less[name] != more[name]]
    changed.sort(key=lambda name: (-abs(more[name] - less[name]), name))
    names = [f"{side.name} {side.arch}" for side in (one, other)]
    listings = (one.listing, other.listing)
    if not all(listing.arguments for listing in listings):
        listings = (replace(one.listing, arguments=()), replace(other.listing, arguments=()))
    lines = tuple(_unified(*listings, names, registers=registers, context=context))
    return Difference(names[0], names[1], figures, {name: (less[name], more[name]) for name in changed}, lines)


def arch_of(cubin: bytes) -> Arch:
    """The target of a cubin, ``a`` where its header does not tell the suffix.

    Raises:
        ArtifactError: no cubin, or one for an architecture that is not known here.
    """
    number, suffixes = cubin_target(cubin)
    suffix = "a" if "a" in suffixes else suffixes[0]
    try:
        return Arch(f"sm_{number}{suffix}")
    except SpecError:
        raise ArtifactError("wrong-arch", f"a cubin for sm_{number}, which this release does not know") from None


def _image_of(artifact: KernelArtifact) -> KernelImage:
    return read_kernel(artifact.cubin, artifact.manifest.entry)


def _resources(image: KernelImage, listing: Listing, manifest: Manifest | None) -> Resources:
    return Resources(
        registers=image.registers,
        stack_bytes=image.stack_bytes,
        spill_stores=None if manifest is None else manifest.spill_stores,
        spill_loads=None if manifest is None else manifest.spill_loads,
        shared_bytes=image.shared_bytes,
        constant_bytes=image.constant_bytes,
        data_bytes=image.data_bytes,
        code_bytes=len(image.code),
        instructions=len(listing.code()),
        kinds=listing.kinds(),
    )


def _arguments(manifest: Manifest, start: int) -> Iterator[tuple[int, str]]:
    """Place and name of each argument, for as long as the manifest's list makes sense."""
    listed = manifest.launch.get("parameters")
    at = start
    for item in listed if isinstance(listed, tuple) else ():
        if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) and item[1] in _ARGUMENT_BYTES):
            return
        size = _ARGUMENT_BYTES[item[1]]
        at = -(-at // size) * size
        yield at, item[0]
        at += size


def _unified(one: Listing, other: Listing, names: Sequence[str], *, registers: bool, context: int) -> Iterator[str]:
    """A unified diff; what it aligns by may say less than what it shows."""
    shown = (one.keys(registers=True), other.keys(registers=True))
    keys = shown if registers else (one.keys(), other.keys())
    matcher = difflib.SequenceMatcher(None, *keys, autojunk=False)
    for number, group in enumerate(matcher.get_grouped_opcodes(context)):
        if not number:
            yield from (f"--- {names[0]}", f"+++ {names[1]}")
        (_, one_start, _, other_start, _), (_, _, one_end, _, other_end) = group[0], group[-1]
        yield f"@@ -{one_start + 1},{one_end - one_start} +{other_start + 1},{other_end - other_start} @@"
        for tag, first, last, third, fourth in group:
            if tag == "equal":
                yield from (f" {line}" for line in shown[1][third:fourth])
            else:
                yield from (f"-{line}" for line in shown[0][first:last])
                yield from (f"+{line}" for line in shown[1][third:fourth])
