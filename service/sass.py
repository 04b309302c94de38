"""Instruction and Listing: a kernel's machine code in a form that people and tests read."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from mlaprep.service.cubin import Function

# What the first part of an opcode does, in the order in which it is looked up.
CLASSES: Final[Mapping[str, re.Pattern[str]]] = {
    name: re.compile(pattern)
    for name, pattern in {
        "global loads": r"LDG\b",
        "global stores": r"STG\b",
        "constant loads": r"(LDC|LDCU|ULDC)\b",
        "other memory": r"LD|ST|AT|RED(?!UX)|CCTL|MEMBAR|SU(LD|ST|ATOM|RED)|T(EX|LD)|UBLK|UTMA|SYNCS",
        "launch order": r"(ACQBULK|PREEXIT)\b",
        "conversions": r"(F2F|F2FP|I2F\w*|F2I|I2FP|HADD2\.F32)\b",
        "moves": r"(U?MOV|IMAD\.MOV|CS2R|S2R|S2UR|R2UR|U?PRMT|U?SEL|FSEL|R2P|P2R)\b",
        "warp exchange": r"(SHFL|U?VOTEU?|MATCH|REDUX|CREDUX|WARPSYNC|ENDCOLLECTIVE|NANOSLEEP)\b",
        "branches": r"(BRA|BRX|JMP|BSSY|BSYNC|BREAK|CALL|RET|EXIT|BMOV|YIELD|KILL|BPT)\b",
        "padding": r"NOP\b",
        "floating point": r"U?([FDH](ADD|MUL|FMA|MNMX|SETP|SET|CHK|SWZADD)\w*|MUFU)\b",
        "integer": r"U?(I(MAD|ADD3?|SETP|ABS|MNMX|SCADD|DP4?A?)|V?IADD|VIMNMX3?|VIADDMNMX|P?LOP3|LEA|SH[FLR]|BMSK|BREV"
        r"|FLO|POPC|SGXT|LOP)\b",
    }.items()
}

_MULTIPLY_ADD: Final = re.compile(r"U?[FDH]FMA")
_ZERO: Final = re.compile(r"[-|]*U?RZ\b")
_REGISTER: Final = re.compile(r"\b(U?R|U?P|B|SB)\d+\b(\.reuse\b)?")
_ARGUMENT: Final = re.compile(r"c\[0x0\]\[(0x[0-9a-f]+)\]")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One machine instruction. ``predicate`` is like ``@!P0``, or empty; ``target`` is where it may lead."""

    address: int
    predicate: str
    opcode: str
    operands: tuple[str, ...]
    target: int | None = None

    @property
    def text(self) -> str:
        """As nvdisasm prints it, without address and end mark."""
        return " ".join(part for part in (self.predicate, self.opcode, ", ".join(self.operands)) if part)

    @property
    def kind(self) -> str:
        """The one of :data:`CLASSES` that it belongs to.

        A multiply-add of zeros is a move: that is how ptxas makes constants where the other pipes are busy.
        """
        if _MULTIPLY_ADD.match(self.opcode) and any(_ZERO.match(factor) for factor in self.operands[1:3]):
            return "moves"
        return next((name for name, pattern in CLASSES.items() if pattern.match(self.opcode)), "other")


@dataclass(frozen=True, slots=True)
class Listing:
    """The instructions of a kernel, those of functions that it calls behind them."""

    functions: tuple[Function, ...]
    instructions: tuple[Instruction, ...]
    arguments: tuple[tuple[int, str], ...] = ()
    """Where in constant bank 0 each kernel argument starts, and its name, as far as they are known."""

    def code(self) -> tuple[Instruction, ...]:
        """The instructions without what pads the end: a branch to itself and NOPs."""
        end = len(self.instructions)
        while end and (self.instructions[end - 1].opcode == "NOP"):
            end -= 1
        if end and self.instructions[end - 1].target == self.instructions[end - 1].address:
            end -= 1
        return self.instructions[:end]

    def opcodes(self) -> Counter[str]:
        """How often each opcode comes, modifiers included."""
        return Counter(instruction.opcode for instruction in self.code())

    def kinds(self) -> dict[str, int]:
        """How many instructions each class has, in the order of :data:`CLASSES`; those with none are left out."""
        counts = Counter(instruction.kind for instruction in self.code())
        return {name: counts[name] for name in (*CLASSES, "other") if counts[name]}

    def text(self) -> str:
        """One line an instruction, with labels in place of addresses, and arguments by name."""
        return "".join(f"{line}\n" for line in self._lines())

    def _lines(self) -> Iterator[str]:
        labels = self._labels()
        names = {function.start: function.name for function in self.functions}
        for instruction in self.code():
            if instruction.address in names:
                yield f"{names[instruction.address]}:"
            if instruction.address in labels:
                yield f"{labels[instruction.address]}:"
            line = f"  {instruction.address:04x}  {instruction.predicate:>5} {self._shown(instruction, labels)}"
            argument = self._argument(instruction)
            yield f"{line:<72}  // {argument}" if argument else line.rstrip()

    def keys(self, *, registers: bool = False) -> list[str]:
        """The instructions for comparing: no addresses, arguments by name, and registers only if asked for."""
        return [self._key(instruction, registers) for instruction in self.code()]

    def _labels(self) -> dict[int, str]:
        targets = sorted({i.target for i in self.code() if i.target is not None})
        starts = {function.start: function.name for function in self.functions[1:]}
        return {target: starts.get(target, f".L{number}") for number, target in enumerate(targets)}

    def _shown(self, instruction: Instruction, labels: Mapping[int, str]) -> str:
        operands: Sequence[str] = instruction.operands
        if instruction.target is not None:
            operands = [*operands[:-1], labels[instruction.target]]
        return " ".join(part for part in (instruction.opcode, ", ".join(operands)) if part)

    def _argument(self, instruction: Instruction) -> str:
        return ", ".join(name for at in _ARGUMENT.findall(instruction.text) if (name := self._named(int(at, 16))))

    def _named(self, at: int) -> str:
        inside = [(start, name) for start, name in self.arguments if start <= at < start + 8]
        if not inside:
            return ""
        start, name = max(inside)
        return name if at == start else f"{name}+{at - start}"

    def _key(self, instruction: Instruction, registers: bool) -> str:
        operands = instruction.operands
        if instruction.target is not None:
            operands = (*operands[:-1], "label")
        text = " ".join(part for part in (instruction.predicate, instruction.opcode, ", ".join(operands)) if part)
        text = _ARGUMENT.sub(lambda match: f"c[{self._named(int(match[1], 16)) or match[1]}]", text)
        if registers:
            return text.replace(".reuse", "")
        return _REGISTER.sub(lambda match: match[1], text)
