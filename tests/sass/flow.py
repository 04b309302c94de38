"""Flow: which instruction may follow which, and what is reached before something else has happened."""

from collections.abc import Callable, Iterable

from mlaprep.service.sass import Instruction, Listing

FALLS_THROUGH = {"BSSY", "BSYNC", "BMOV", "YIELD"}


class UnknownFlow(Exception):
    """Control flow that cannot be followed, so that nothing may be claimed of it."""


def always(instruction: Instruction) -> bool:
    """Whether it runs in every thread that comes to it."""
    return instruction.predicate in ("", "@PT", "@UPT")


class Flow:
    """The control flow of a kernel. A call leads into the function and past it; a return leads nowhere."""

    def __init__(self, listing: Listing) -> None:
        self.listing = listing
        self._at = {instruction.address: instruction for instruction in listing.instructions}
        self._behind = dict(zip(self._at, [*self._at][1:], strict=False))
        self._check_barriers()
        self._followers = {address: self._follow(instruction) for address, instruction in self._at.items()}

    @property
    def start(self) -> Instruction:
        return self.listing.instructions[0]

    def followers(self, instruction: Instruction) -> list[Instruction]:
        """What may run next."""
        return [self._at[address] for address in self._followers[instruction.address]]

    def reached(
        self, starts: Iterable[Instruction], until: Callable[[Instruction], bool] = lambda _: False
    ) -> list[Instruction]:
        """Everything that may run from the starts on, in order of address; a path ends at what ``until`` names.

        What ends a path is left out unless something else leads to it, so a barrier only counts where it always runs.
        """
        seen: set[int] = set()
        waiting = [instruction for instruction in starts if not until(instruction)]
        while waiting:
            instruction = waiting.pop()
            if instruction.address not in seen:
                seen.add(instruction.address)
                waiting += [follower for follower in self.followers(instruction) if not until(follower)]
        return [instruction for instruction in self.listing.instructions if instruction.address in seen]

    def _follow(self, instruction: Instruction) -> list[int]:
        name = instruction.opcode.partition(".")[0]
        behind = [self._behind[instruction.address]] if instruction.address in self._behind else []
        if name in ("EXIT", "RET"):
            return [] if always(instruction) else behind
        if name in ("BRA", "CALL"):
            if instruction.target not in self._at:
                raise UnknownFlow(f"a branch out of the code: {instruction.text}")
            # A branch has operands beside its target where these decide on it.
            jumps = name == "BRA" and always(instruction) and len(instruction.operands) == 1
            return [instruction.target, *([] if jumps else behind)]
        if instruction.kind == "branches" and name not in FALLS_THROUGH:
            raise UnknownFlow(f"an instruction that is not known here: {instruction.text}")
        return behind

    def _check_barriers(self) -> None:
        """Threads that meet at a barrier go on right behind it, which is what falling through takes for granted."""
        for instruction in self.listing.instructions:
            if instruction.opcode.startswith("BSSY"):
                meeting = self._at.get((instruction.target or 0) - 16)
                barrier = instruction.operands[0]
                if meeting is None or not meeting.opcode.startswith("BSYNC") or meeting.operands != (barrier,):
                    raise UnknownFlow(f"a barrier that is not met ahead of where it leads: {instruction.text}")
