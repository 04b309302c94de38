"""JsonText: a mapping that keeps only its text."""

import copy
import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlaprep.kernels_cache.json_text import JsonText
from mlaprep.kernels_cache.key import canonical_json
from mlaprep.kernels_cache.strict_json import parse_strict

VALUE = {"b": 1, "a": [1, 2.5, {"c": None}], "d": True, "e": "é"}

_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63) + 1, 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)


def test_it_reads_as_what_it_was_made_of() -> None:
    text = JsonText(VALUE)
    assert text.text == canonical_json(VALUE)
    assert (text["b"], text["a"], text["d"], len(text), list(text)) == (1, (1, 2.5, {"c": None}), True, 4, list("abde"))
    assert text == JsonText(dict(reversed(list(VALUE.items()))))
    assert text | {"b": 2} == dict(text) | {"b": 2}
    assert JsonText(text).text == text.text
    with pytest.raises(KeyError):
        text["nothing"]


def test_one_and_true_are_told_apart() -> None:
    assert JsonText({"a": 1}) != JsonText({"a": True})
    assert JsonText({"a": 1}) != JsonText({"a": 1.0})


def test_nobody_can_change_it() -> None:
    source = {"a": [1], "b": {"c": 1}}
    text = JsonText(source)
    source["a"].append(2)
    assert text["a"] == (1,)
    with pytest.raises(TypeError):
        text["b"]["c"] = 2
    with pytest.raises(TypeError):
        text["b"] = 2  # type: ignore[index]


def test_copies_and_pickles_are_equal() -> None:
    text = JsonText(VALUE)
    for other in (copy.copy(text), copy.deepcopy(text), pickle.loads(pickle.dumps(text))):
        assert other.text == text.text


def test_shared_texts_are_one_object() -> None:
    assert JsonText(VALUE).shared().text is JsonText(dict(VALUE)).shared().text


@pytest.mark.parametrize(
    "value", [{"a": 2**63}, {"a": [{"b": -(2**63)}]}, {"a": float("nan")}, {"a": "\ud800"}, {"a": {1: 2}}]
)
def test_what_json_cannot_carry_is_refused(value: dict[str, object]) -> None:
    with pytest.raises((TypeError, ValueError)):
        JsonText(value)


@given(
    st.dictionaries(
        st.text(), st.recursive(_SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))
    )
)
def test_what_was_parsed_strictly_makes_the_same_text(value: dict[str, Any]) -> None:
    parsed = parse_strict(canonical_json(value), max_bytes=2**20)
    assert JsonText.parsed(parsed) == JsonText(value)


def test_a_lone_surrogate_is_refused_of_parsed_text_too() -> None:
    with pytest.raises(ValueError, match="surrogates"):
        JsonText.parsed(json.loads('{"a": "\\ud800"}'))
    assert JsonText.parsed(json.loads('{"a": "\\ud83d\\ude00"}'))["a"] == "\U0001f600"
