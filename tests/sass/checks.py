"""What the machine code of every kernel must show. A check yields one line for each fault it finds."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

from sass.flow import UnknownFlow, always
from sass.kernels import Kernel

from mlaprep.service.sass import Instruction
from mlaprep.templates.fields import TILE
from mlaprep.templates.signature import kernel_parameters
from mlaprep.templates.spec import KernelSpec

CONVERSION: Final = "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C"
WAIT: Final = "ACQBULK"
RELEASE: Final = "PREEXIT"

BUDGETS: Final = {
    # rotation: registers with 16, 8 and fewer elements a thread, then the same with a scale or tile scales
    "none": ((32, 24, 24), (40, 32, 32)),
    "interleaved": ((48, 32, 24), (56, 40, 32)),
    "neox": ((80, 48, 24), (80, 56, 32)),
}
"""Registers a thread. They come in eights; blocks of 576 threads leave room for 112."""

_GLOBAL: Final = ("global loads", "global stores")
_ADDRESS: Final = re.compile(r"desc\[UR\d+\]\[R\d+\.64(\+-?0x[0-9a-f]+)?\]")
_CONSTANT: Final = re.compile(r"c\[(0x[0-9a-f]+)\]\[(0x[0-9a-f]+)\]")
_SIZES: Final = {"256": 32, "128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
_FMA_IN_DIVISION: Final = 5
"""Multiply-adds of one fp32 division, beside its range check FCHK, as ptxas writes it for every architecture."""


def check_memory_spaces(kernel: Kernel) -> Iterator[str]:
    """No spills, no stack, no local or shared memory, no atomics: global loads and stores are all there is."""
    manifest, resources = kernel.artifact.manifest, kernel.inspection.resources
    for name in ("spill_stores", "spill_loads", "stack_bytes", "shared_bytes"):
        if getattr(manifest, name) or getattr(resources, name):
            yield f"{name}: {getattr(resources, name)}"
    yield from (f"{i.text} is neither a global load nor a global store" for i in _code(kernel, "other memory", "other"))


def check_addresses(kernel: Kernel) -> Iterator[str]:
    """Every access goes by a 64-bit address, and every argument is read whole.

    A stride or pointer whose upper half nobody reads was narrowed. Slots and positions that are narrowed show in
    the loads: ptxas asks for no more than is used.
    """
    for access in _code(kernel, *_GLOBAL):
        where = [operand for operand in access.operands if "[" in operand]
        if ".E" not in access.opcode or len(where) != 1 or not _ADDRESS.fullmatch(where[0]):
            yield f"{access.text} does not use a 64-bit address"
    read = set(_argument_bytes(kernel))
    at = 0
    for parameter in kernel_parameters(kernel.spec):
        size = 4 if parameter.type == "u32" else 8
        at = -(-at // size) * size
        missing = set(range(at, at + size)) - read
        if missing:
            yield f"{len(missing)} of {size} bytes of the argument {parameter.name} are never read"
        at += size


def check_coherence(kernel: Kernel) -> Iterator[str]:
    """No load through the non-coherent path: a predecessor may still write what it reads."""
    yield from (f"{i.text} is not coherent" for i in _code(kernel, *_GLOBAL) if ".CONSTANT" in i.opcode)


def check_loads(kernel: Kernel) -> Iterator[str]:
    """Inputs come in the widest loads that their alignment allows, each once, whatever the source."""
    yield from _differences("load", _widths(kernel, "global loads"), expected_loads(kernel.spec))


def check_stores(kernel: Kernel) -> Iterator[str]:
    """Results go in the widest stores that their alignment allows."""
    yield from _differences("store", _widths(kernel, "global stores"), expected_stores(kernel.spec))


def check_conversions(kernel: Kernel) -> Iterator[str]:
    """fp32 becomes e4m3 by the packed saturating conversion, two values each, and by nothing else."""
    opcodes = kernel.inspection.listing.opcodes()
    sites = _code_sites(kernel.spec)
    wanted = sites * max(kernel.spec.elements_per_thread // 2, 1)
    if opcodes[CONVERSION] != wanted:
        yield f"{opcodes[CONVERSION]} packed saturating conversions instead of {wanted}"
    others = [name for name in opcodes if name != CONVERSION and re.search(r"E4M3|E5M2|E8M0", name)]
    yield from (f"{name} converts to an 8-bit float too" for name in others)


def check_wait(kernel: Kernel) -> Iterator[str]:
    """Nothing touches global memory, releases dependents or ends ahead of the wait, on any path."""
    if not kernel.spec.pdl:
        yield from (f"{i.text} in a kernel without PDL" for i in _named(kernel, WAIT, RELEASE))
        return
    if not _named(kernel, WAIT):
        yield "there is no wait"
    flow = kernel.flow
    for early in flow.reached([flow.start], lambda i: i.opcode == WAIT and always(i)):
        if early.kind in (*_GLOBAL, "other memory") or early.opcode in (RELEASE, "EXIT"):
            yield f"{early.text} at {early.address:#x} can run ahead of the wait"


def check_release(kernel: Kernel) -> Iterator[str]:
    """Whatever path loads an input also releases dependents; paths without one release them by ending."""
    if not kernel.spec.pdl:
        return
    if not _named(kernel, RELEASE):
        yield "there is no release"
    after = kernel.flow.reached(_code(kernel, "global loads"), lambda i: i.opcode == RELEASE and always(i))
    yield from (f"the exit at {i.address:#x} can be reached without a release" for i in after if i.opcode == "EXIT")


def check_rotation(kernel: Kernel) -> Iterator[str]:
    """A rotation is two products and one sum, each rounded: multiply-adds come in divisions only."""
    entry = _entry(kernel)
    opcodes = Counter(instruction.opcode for instruction in entry)
    fused = sum(bool(re.match(r"U?[FHD]FMA", i.opcode)) and i.kind != "moves" for i in entry)
    divisions = opcodes["FCHK"]
    if fused != _FMA_IN_DIVISION * divisions:
        yield f"{fused} multiply-adds with {divisions} divisions"
    elements = kernel.spec.elements_per_thread
    rotates = kernel.spec.rope != "none"
    scaled = kernel.spec.q_scale != "none" or kernel.spec.kv_scale != "none"
    products, sums = (2 * rotates + scaled) * elements, rotates * elements
    if opcodes["FMUL"] < products or opcodes["FADD"] < sums:
        yield f"{opcodes['FMUL']} products and {opcodes['FADD']} sums instead of {products} and {sums}"


def check_registers(kernel: Kernel) -> Iterator[str]:
    """Registers are those the compiler reports, and within the budget of the kernel's class."""
    used, limit = kernel.inspection.resources.registers, budget(kernel.spec)
    if used != kernel.artifact.manifest.registers:
        yield f"{used} registers in the cubin, {kernel.artifact.manifest.registers} in the manifest"
    if used > limit:
        yield f"{used} registers; the budget is {limit}"


CHECKS: Final[dict[str, Callable[[Kernel], Iterator[str]]]] = {
    "memory spaces": check_memory_spaces,
    "addresses": check_addresses,
    "coherence": check_coherence,
    "loads": check_loads,
    "stores": check_stores,
    "conversions": check_conversions,
    "wait": check_wait,
    "release": check_release,
    "rotation": check_rotation,
    "registers": check_registers,
}


def faults(kernel: Kernel) -> list[str]:
    """Everything that any check finds, each with the check's name ahead of it."""
    found = []
    for name, check in CHECKS.items():
        try:
            found += [f"{name}: {fault}" for fault in check(kernel)]
        except UnknownFlow as error:
            found.append(f"{name}: {error}")
    return found


def budget(spec: KernelSpec) -> int:
    """Registers that a thread of this kernel may take."""
    heavy = "scalar" in (spec.q_scale, spec.kv_scale) or spec.q_scale == "token" or spec.layout == "ds_mla"
    column = {16: 0, 8: 1}.get(spec.elements_per_thread, 2)
    return BUDGETS[spec.rope][heavy][column]


def expected_loads(spec: KernelSpec) -> Counter[int]:
    """How many loads of how many bytes the kernel of a spec has."""
    elements = spec.elements_per_thread
    share = 2 * elements
    width = min(share, spec.load_bytes)
    loads = Counter({width: share // width})
    if spec.rope != "none":
        loads[8 if spec.position_dtype == "i64" else 4] += 1
        if spec.rope == "interleaved":
            angle_bytes = 4 * elements // 2
        elif spec.rope_dim // 2 % elements == 0:
            angle_bytes = 4 * elements
            loads[width] += share // width
        else:  # every element finds its own angle and partner
            loads[4] += 2 * elements
            loads[2] += elements
            angle_bytes = 0
        if angle_bytes:
            width = min(angle_bytes, 16)
            loads[width] += 2 * angle_bytes // width
    if spec.write_kv:
        loads[8 if spec.loc_dtype == "i64" else 4] += 1
    loads[4] += (spec.q_scale != "none") + (spec.kv_scale != "none")
    return +loads


def expected_stores(spec: KernelSpec) -> Counter[int]:
    """How many stores of how many bytes the kernel of a spec has."""
    elements = spec.elements_per_thread
    codes = Counter({elements: 1})
    query = codes if spec.quantised_query else _element_stores(spec)
    stores: Counter[int] = Counter()
    if spec.write_q:
        stores += query
        if spec.pad_heads_to > spec.num_heads:
            stores += query
    if spec.write_kv and spec.layout == "ds_mla":
        stores += codes + Counter({4: 1}) + _element_stores(spec)
    elif spec.write_kv and not (spec.write_q and _shares_store(spec)):
        stores += _element_stores(spec) if spec.layout == "same" else codes
    return stores


def _element_stores(spec: KernelSpec) -> Counter[int]:
    """Two-byte results: 16 bytes at a time, or what the place of a ds_mla row's rotary columns allows."""
    share = 2 * spec.elements_per_thread
    width = min(share, 16)
    if spec.write_kv and spec.layout == "ds_mla":
        rotary_at = spec.kv_lora_rank + spec.kv_lora_rank // TILE * 4
        width = math.gcd(width, rotary_at, spec.elements_per_thread)
    return Counter({width: share // width})


def _shares_store(spec: KernelSpec) -> bool:
    """Whether query and cache row hold the same kind of value, made the same way, so that one store does for both."""
    if spec.layout == "fp8":
        return True
    return spec.layout == "same" and spec.q_scale == "none"


def _code_sites(spec: KernelSpec) -> int:
    """Places in the code where a thread's elements become e4m3."""
    query = spec.write_q and spec.quantised_query
    cache = spec.write_kv and spec.layout != "same"
    return int(query) + int(cache) - int(query and cache and spec.layout == "fp8")


def _code(kernel: Kernel, *kinds: str) -> list[Instruction]:
    return [instruction for instruction in kernel.inspection.listing.code() if instruction.kind in kinds]


def _named(kernel: Kernel, *opcodes: str) -> list[Instruction]:
    return [instruction for instruction in kernel.inspection.listing.code() if instruction.opcode in opcodes]


def _entry(kernel: Kernel) -> list[Instruction]:
    """The kernel itself, without the functions that it calls."""
    end = kernel.inspection.listing.functions[0].end
    return [instruction for instruction in kernel.inspection.listing.code() if instruction.address < end]


def _widths(kernel: Kernel, kind: str) -> Counter[int]:
    return Counter(_bytes_moved(access) for access in _code(kernel, kind))


def _bytes_moved(access: Instruction) -> int:
    parts = access.opcode.split(".")
    return next((size for part, size in _SIZES.items() if part in parts), 4)


def _differences(what: str, found: Counter[int], wanted: Counter[int]) -> Iterator[str]:
    for width in sorted(found | wanted, reverse=True):
        if found[width] != wanted[width]:
            yield f"{found[width]} {what}s of {width} bytes instead of {wanted[width]}"


def _argument_bytes(kernel: Kernel) -> Iterator[int]:
    """Offsets of every byte of the arguments that some instruction reads."""
    start = min(at for at, _ in kernel.inspection.listing.arguments)
    for instruction in kernel.inspection.listing.code():
        for number, operand in enumerate(instruction.operands):
            match = _CONSTANT.search(operand)
            if match is None or int(match[1], 16):
                continue
            size = 4
            if instruction.kind == "constant loads":
                size = _bytes_moved(instruction)
            elif ".64" in instruction.opcode or (
                ".WIDE" in instruction.opcode and number == len(instruction.operands) - 1
            ):
                size = 8
            at = int(match[2], 16) - start
            yield from range(at, at + size)
