"""The table in C as it launches: what reaches a driver's functions, which are callbacks here."""

import ctypes
import os
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from kernel.tables import native_table

from mlaprep.clients.layouts import LayoutTable
from mlaprep.clients.plan import LaunchConfig
from mlaprep.clients.prepared import OUT, TENSORS, PreparedLaunch


class Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))


class Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(Config), ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p
)
CONTEXT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p))
PUSH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class Refused(RuntimeError):
    pass


@dataclass
class Driver:
    """libcuda's four functions, recorded. ``arguments`` are read as the kernel would read them."""

    kinds: tuple[Any, ...]
    current: int = 77
    answer: int = 0
    pdl: int = 1
    log: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.functions = (LAUNCH(self.launch), CONTEXT(self.get), PUSH(self.push), CONTEXT(self.pop))

    def launch(self, config: Any, function: int, arguments: Any, extra: Any) -> int:
        found = config.contents
        read = [ctypes.cast(arguments[i], ctypes.POINTER(kind)).contents.value for i, kind in enumerate(self.kinds)]
        attributes = [found.attributes[i] for i in range(found.attribute_count)]
        self.log.append((tuple(found.grid), tuple(found.block), found.shared, found.stream, function, read))
        self.log.append([(attribute.id, attribute.value[0]) for attribute in attributes])
        assert not extra
        return self.answer

    def get(self, context: Any) -> int:
        context[0] = self.current
        return 0

    def push(self, context: int) -> int:
        self.log.append(("push", context))
        return 0

    def pop(self, context: Any) -> int:
        self.log.append("pop")
        return 0

    # What a launcher is, beside the call from Python that is never made here.
    def __call__(self, *_: object) -> None:
        raise AssertionError("launched from Python")

    def native(self) -> tuple[int, ...]:
        addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in self.functions]
        return (*addresses, 4242, 77, self.pdl)  # type: ignore[arg-type]

    def refuse(self, result: int) -> None:
        raise Refused(result)


KINDS = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_longlong)
SLOTS = tuple({"q_nope": 0, "loc": 1}.get(name, -1) for name in TENSORS)
GRID, BLOCK, STREAM = (3, 2, 1), (36, 4, 1), 0x7FFF_FFFF_FFF0


def plan_of(driver: Driver, **changes: Any) -> PreparedLaunch:
    fields: dict[str, Any] = {
        "pid": os.getpid(),
        "launch": driver,
        "config": LaunchConfig(GRID, BLOCK),
        "stream": lambda device: STREAM + device,
        "device": torch.device("cpu"),
        "pointers": (OUT, TENSORS.index("q_nope")),
        "scalars": (2**32 - 1, -(2**62)),
        "result_shape": (2, 3, 4),
        "result_dtype": torch.float8_e4m3fn,
        "like": torch.empty(1, dtype=torch.float8_e4m3fn).expand(2, 3, 4),
    }
    return PreparedLaunch(**(fields | changes))


@pytest.fixture
def table() -> LayoutTable:
    return native_table()


def test_a_launch_reaches_the_driver_as_planned(table: LayoutTable) -> None:
    driver = Driver(KINDS)
    assert table.add((torch.zeros(2, 3, 4), torch.zeros(2)), {}, SLOTS, plan_of(driver))
    for _ in range(3):
        driver.log.clear()
        lead = torch.zeros(2, 3, 4)
        query = table.call((lead, torch.zeros(2)), {})
        assert query.shape == (2, 3, 4)
        assert query.is_contiguous()
        assert query.dtype == torch.float8_e4m3fn
        arguments = [query.data_ptr(), lead.data_ptr(), 2**32 - 1, -(2**62)]
        assert driver.log == [(GRID, BLOCK, 0, STREAM, 4242, arguments), [(6, 1)]]
    assert table.hits == 3


def test_the_callers_result_is_written_and_returned(table: LayoutTable) -> None:
    driver = Driver(KINDS, pdl=0)
    slots = (*SLOTS[:OUT], 2)
    out = torch.zeros(2, 3, 4, dtype=torch.uint8)
    assert table.add((torch.zeros(2, 3, 4), torch.zeros(2), out), {}, slots, plan_of(driver, like=None))
    other = torch.ones_like(out)
    assert table.call((torch.zeros(2, 3, 4), torch.zeros(2), other), {}) is other
    assert driver.log[0][-1][0] == other.data_ptr()
    assert driver.log[1] == []


def test_a_kernel_of_another_context_is_launched_in_its_own(table: LayoutTable) -> None:
    driver = Driver(KINDS, current=5)
    table.add((torch.zeros(1), None), {}, SLOTS, plan_of(driver))
    table.call((torch.zeros(1), None), {})
    assert driver.log[0] == ("push", 77)
    assert driver.log[-1] == "pop"


@pytest.mark.parametrize("current", [77, 5])
def test_a_refused_launch_raises_and_leaves_the_table_usable(table: LayoutTable, current: int) -> None:
    driver = Driver(KINDS, current=current, answer=719)
    table.add((torch.zeros(1), None), {}, SLOTS, plan_of(driver))
    for _ in range(3):
        with pytest.raises(Refused, match="719"):
            table.call((torch.zeros(1), None), {})
    assert driver.log.count("pop") == (3 if current == 5 else 0)
    assert table.hits == 0
    driver.answer = 0
    assert table.call((torch.zeros(1), None), {}).shape == (2, 3, 4)


def test_a_stream_that_cannot_be_had_launches_nothing(table: LayoutTable) -> None:
    driver = Driver(KINDS)

    def stream(device: int) -> int:
        raise RuntimeError("no stream")

    table.add((torch.zeros(1), None), {}, SLOTS, plan_of(driver, stream=stream))
    with pytest.raises(RuntimeError, match="no stream"):
        table.call((torch.zeros(1), None), {})
    assert driver.log == []


def test_a_kernel_that_makes_no_query_answers_with_its_plan(table: LayoutTable) -> None:
    driver = Driver(KINDS[1:])
    plan = plan_of(driver, pointers=(TENSORS.index("q_nope"),), like=None, result_shape=None)
    table.add((torch.zeros(1), None), {}, SLOTS, plan)
    assert table.call((torch.zeros(1), None), {}) is plan


@pytest.mark.parametrize(
    "changes",
    [
        {"pointers": (99,)},
        {"pointers": (TENSORS.index("k_nope"),)},
        {"pointers": (TENSORS.index("loc"),)},
        {"pointers": (0,) * 40},
        {"scalars": (0,) * 40},
        {"scalars": (2**70,)},
    ],
)
def test_a_plan_that_does_not_fit_the_call_is_refused(table: LayoutTable, changes: dict[str, Any]) -> None:
    with pytest.raises((ValueError, OverflowError)):
        table.add((torch.zeros(1), None), {}, SLOTS, plan_of(Driver(KINDS), **changes))
    assert len(table) == 0
