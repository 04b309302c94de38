"""Switches from the environment: known words only, so that a typing error is never taken for off."""

import pytest

from mlaprep.templates.environment import read_switch
from mlaprep.templates.errors import SpecError


@pytest.mark.parametrize("text", ["1", "true", "TRUE", " yes ", "on"])
def test_on(text: str) -> None:
    assert read_switch("MLAPREP_OFFLINE", {"MLAPREP_OFFLINE": text})


@pytest.mark.parametrize("environ", [{}, *({"MLAPREP_OFFLINE": text} for text in ("", "0", "False", "no", "off", " "))])
def test_off(environ: dict[str, str]) -> None:
    assert not read_switch("MLAPREP_OFFLINE", environ)


@pytest.mark.parametrize("text", ["2", "y", "ture", "enabled", "-1", "1.0", "none"])
def test_anything_else_is_refused_by_name(text: str) -> None:
    with pytest.raises(SpecError) as failure:
        read_switch("MLAPREP_OFFLINE", {"MLAPREP_OFFLINE": text})
    (problem,) = failure.value.problems
    assert problem.field == "MLAPREP_OFFLINE"
    assert "true" in problem.allowed
    assert f"'{text}'" not in str(failure.value)
