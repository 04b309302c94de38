"""Spans: how long it took to find, fetch, compile and load kernels, where the process traces.

OpenTelemetry is never imported here: a process that has not imported it and set up a tracer provider has nowhere to
send a span, and pays one look into a dictionary.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

from mlaprep.templates.arch import Arch
from mlaprep.templates.spec import KernelSpec

Note = Callable[[str, str | int | float | bool], None]
"""Sets an attribute of a span, named without its prefix."""

_API: Final = "opentelemetry.trace"


@contextlib.contextmanager
def span(name: str, spec: KernelSpec, arch: Arch, **attributes: str | int) -> Iterator[Note]:
    """A span ``mlaprep.<name>`` around a block, with ``mlaprep.variant_id``, ``mlaprep.arch`` and ``attributes``.

    An error that leaves the block is recorded and goes on. Without a tracer provider it does nothing.
    """
    trace: Any = sys.modules.get(_API)
    if trace is None or isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        yield _nowhere
        return
    known: dict[str, str | int] = {"variant_id": spec.variant_id, "arch": str(arch)}
    named = {f"mlaprep.{key}": value for key, value in (known | attributes).items()}
    with trace.get_tracer("mlaprep").start_as_current_span(f"mlaprep.{name}", attributes=named) as current:

        def note(key: str, value: str | int | float | bool) -> None:
            current.set_attribute(f"mlaprep.{key}", value)

        yield note


def _nowhere(key: str, value: str | int | float | bool) -> None:
    pass
