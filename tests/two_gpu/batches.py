"""Batch: one call's tensors on one device, and the bytes that must come of it."""

from collections.abc import Callable
from typing import Any

import torch
from kernel.calls import make

from mlaprep.clients.launch import KernelDriver, LoadedKernel, cuda_driver
from mlaprep.clients.reference import prepare_chain
from mlaprep.templates.spec import KernelSpec

H, R, D, S = 12, 512, 64, 64
SLOTS = (5, -1, 9, 63, 64, 2**40 + 17, 0)
POISON = 0x5A
NAMES = ("q_nope", "q_rope", "k_nope", "k_rope")


def batch_spec() -> KernelSpec:
    """The kernel of every batch, with every input stride dynamic: the one that prepare takes, too."""
    return make(len(SLOTS), H, R, D, rows=S, loc=SLOTS).spec


class Batch:
    """Tensors of a device, filled and awaited; what is wanted comes from the chain on the CPU."""

    def __init__(self, place: torch.device, seed: int = 0) -> None:
        call = make(len(SLOTS), H, R, D, rows=S, loc=SLOTS, seed=seed)
        sources = [getattr(call, name) for name in NAMES]
        pool = torch.full((S, R + D), POISON, dtype=torch.uint8)
        self.place = place
        self.sources = [source.to(place) for source in sources]
        self.loc = call.loc.to(place)
        self.cache = pool.to(place)
        query = prepare_chain(*sources, pool, call.loc)
        assert query is not None
        self.wanted_query, self.wanted_cache = query.view(torch.uint8).to(place), pool.to(place)
        self.good = torch.ones((), dtype=torch.bool, device=place)
        if place.type == "cuda":
            torch.cuda.synchronize(place)

    def operands(self, cache: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        return *self.sources, self.cache if cache is None else cache, self.loc

    def step(self, call: Callable[..., Any]) -> None:
        """Poison the cache, call, and note on the device whether every byte is right; waits for nothing."""
        self.cache.fill_(POISON)
        if self.place.type == "cuda":
            with torch.cuda.device(self.place):
                torch.cuda._sleep(50_000)  # so that a launch on another stream would come before the poison
        self.note(call(*self.operands()))

    def note(self, query: torch.Tensor) -> None:
        right = (query.view(torch.uint8) == self.wanted_query).all() & (self.cache == self.wanted_cache).all()
        self.good.logical_and_(right)

    def right(self, query: torch.Tensor) -> bool:
        """Whether this query, the cache and all that was noted are right; waits for the device."""
        self.note(query)
        return bool(self.good)


class CountingDriver:
    """A driver that also lists the device of every module load."""

    def __init__(self, driver: KernelDriver | None = None) -> None:
        self._driver: Any = driver or cuda_driver()
        self.loads: list[int] = []

    def load(self, cubin: bytes, entry: str, device: int) -> LoadedKernel:
        self.loads.append(device)
        loaded: LoadedKernel = self._driver.load(cubin, entry, device)
        return loaded

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)


def synchronize() -> None:
    for device in range(torch.cuda.device_count()):
        torch.cuda.synchronize(device)
