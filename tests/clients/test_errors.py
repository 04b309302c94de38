"""The error tree: what its docstring draws, and that errors survive the way between processes."""

import inspect
import pickle
import re

import pytest

from mlaprep.clients import errors
from mlaprep.clients.errors import (
    ArtifactRejected,
    DriverError,
    FieldProblem,
    KernelUnavailable,
    MlaprepError,
    ServiceRefused,
    ServiceUnreachable,
)

OWN = [value for _, value in inspect.getmembers(errors, inspect.isclass) if issubclass(value, MlaprepError)]


@pytest.mark.parametrize("error", OWN, ids=lambda error: error.__name__)
def test_the_docstring_draws_every_error(error: type[MlaprepError]) -> None:
    assert re.search(rf"\b{error.__name__}\b", errors.__doc__ or "")
    assert error.__doc__


def test_all_is_exact() -> None:
    assert set(errors.__all__) == {error.__name__ for error in OWN} | {"FieldProblem"}


@pytest.mark.parametrize(
    "error",
    [
        KernelUnavailable("none", variant_id="v", arch="sm_90a", attempts=["a", "b"]),
        ServiceUnreachable("silent", retry_after=3.0),
        ServiceRefused("no", status=422, problem="spec", problems=[FieldProblem("a", "b", "c")], retry_after=1.0),
        ArtifactRejected("wrong", reason="source"),
        DriverError("failed", code=209),
    ],
    ids=lambda error: type(error).__name__,
)
def test_pickles_with_its_attributes(error: MlaprepError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
