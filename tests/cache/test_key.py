"""The key: every input counts, nothing else does, and no two inputs share one."""

import itertools
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlaprep.kernels_cache.key import CacheKey, cache_key, canonical_json, is_arch, is_digest, request_key

PARTS: dict[str, Any] = {
    "source": "__global__ void f();\n",
    "options": ("-arch=sm_90a", "-std=c++17"),
    "arch": "sm_90a",
    "nvrtc_version": "12.9.86",
}
SPEC = {"num_heads": 12, "pdl": True, "layout": "fp8", "scale": None, "strides": {"a": 576, "b": "dynamic"}}
SEVEN_ARCHS = ("sm_90", "sm_90a", "sm_100a", "sm_100f", "sm_103a", "sm_120a", "sm_121a")

text = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), max_size=12)
parts = st.fixed_dictionaries(
    {
        "source": text,
        "options": st.lists(text, max_size=4).map(tuple),
        "arch": st.sampled_from(SEVEN_ARCHS),
        "nvrtc_version": text,
    }
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda children: st.lists(children, max_size=4) | st.dictionaries(text, children, max_size=4),
    max_leaves=12,
)

KEYS_SCRIPT = """
import random, sys
from mlaprep.kernels_cache.key import cache_key, request_key
shuffle = random.Random(int(sys.argv[1])).shuffle
for number in range(200):
    members = [("num_heads", number), ("pdl", True), ("layout", "fp8"), ("strides", {"a": 576, "b": "dynamic"})]
    shuffle(members)
    print(request_key(arch="sm_90a", spec=dict(members), generator="g"))
    print(cache_key(source=f"// {number}", options=["-a", "-b"], arch="sm_90a", nvrtc_version="12.9.86"))
"""


def keys_of_another_process(seed: int, **environ: str) -> str:
    cwd = environ.pop("cwd", None)
    done = subprocess.run(
        [sys.executable, "-c", KEYS_SCRIPT, str(seed)],
        env=os.environ | environ,
        cwd=cwd,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_a_key_is_a_full_lower_case_sha256() -> None:
    assert is_digest(cache_key(**PARTS))
    assert cache_key(**PARTS) == CacheKey(**PARTS).digest == cache_key(**PARTS | {"options": list(PARTS["options"])})


def test_the_key_of_given_parts_never_changes() -> None:
    # A new value here orphans every cache in the field: raise SCHEMA on purpose, then write it down again.
    assert cache_key(**PARTS) == "ff42acd034783fdd0319d008a20b6d7aa74f4d630b5b5d1673037bf3eab78ac1"
    assert (
        request_key(arch="sm_90a", spec=SPEC, generator="g")
        == "d7bfc64f41b9c625cf4a9756a659768c0f3b57feb9f01451b4de8169a20c7791"
    )


def test_B034_seven_architectures_seven_keys() -> None:
    assert len({cache_key(**PARTS | {"arch": arch}) for arch in SEVEN_ARCHS}) == 7
    assert len({request_key(arch=arch, spec=SPEC, generator="g") for arch in SEVEN_ARCHS}) == 7


@pytest.mark.parametrize(
    "change",
    [
        {"source": "__global__ void f();\r\n"},
        {"source": "__global__ void F();\n"},
        {"options": ("-std=c++17", "-arch=sm_90a")},
        {"options": ("-arch=sm_90a",)},
        {"options": ("-arch=sm_90a", "-std=c++17", "")},
        {"options": ("-arch=sm_90a-std=c++17",)},
        {"arch": "sm_90"},
        {"nvrtc_version": "12.9.79"},
        {"nvrtc_version": "12.9"},
    ],
)
def test_B035_every_input_changes_the_key(change: dict[str, Any]) -> None:
    assert cache_key(**PARTS | change) != cache_key(**PARTS)


def test_B035_every_part_of_a_request_changes_its_digest() -> None:
    base = {"arch": "sm_90a", "spec": SPEC, "generator": "g"}
    changes: list[dict[str, Any]] = [
        {"arch": "sm_100a"},
        {"generator": "h"},
        {"spec": SPEC | {"num_heads": 13}},
        {"spec": SPEC | {"num_heads": 12.0}},
        {"spec": SPEC | {"num_heads": "12"}},
        {"spec": SPEC | {"pdl": 1}},
        {"spec": {name: value for name, value in SPEC.items() if name != "scale"}},
    ]
    digests = [request_key(**base | change) for change in ({}, *changes)]
    assert len(set(digests)) == len(digests)


def test_B035_schema_changes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = cache_key(**PARTS)
    monkeypatch.setattr("mlaprep.kernels_cache.key.SCHEMA", 2)
    assert cache_key(**PARTS) != before


def test_B035_place_and_user_do_not_change_the_key(tmp_path: Path) -> None:
    here = keys_of_another_process(1)
    elsewhere = keys_of_another_process(
        1, cwd=str(tmp_path), TMPDIR=str(tmp_path), HOME=str(tmp_path), USER="nobody", LANG="C", TZ="Asia/Tokyo"
    )
    assert here == elsewhere


def test_B036_keys_are_equal_across_processes_and_hash_seeds() -> None:
    runs = [
        keys_of_another_process(shuffle_seed, PYTHONHASHSEED=hash_seed)
        for shuffle_seed, hash_seed in enumerate(["0", "1", "random", "random", "2"])
    ]
    assert len(runs[0].split()) == len(set(runs[0].split())) == 400
    assert set(runs) == {runs[0]}


@given(parts, parts)
def test_different_parts_have_different_keys(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert (cache_key(**one) == cache_key(**other)) == (one == other)


@given(text, st.integers(0, 12), st.integers(0, 12))
def test_moving_text_over_a_border_changes_the_key(whole: str, first: int, second: int) -> None:
    def split(at: int) -> dict[str, Any]:
        return PARTS | {"options": (whole[:at], whole[at:])}

    same = split(first)["options"] == split(second)["options"]
    assert (cache_key(**split(first)) == cache_key(**split(second))) == same


@given(st.lists(json_values, min_size=2, max_size=2))
def test_canonical_json_is_one_text_per_value(pair: list[Any]) -> None:
    one, other = (canonical_json(value) for value in pair)
    assert (one == other) == (repr_sorted(pair[0]) == repr_sorted(pair[1]))


def repr_sorted(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{name!r}:{repr_sorted(value[name])}" for name in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(repr_sorted, value)) + "]"
    return repr(value)


@given(st.dictionaries(text, json_values, max_size=6), st.randoms())
def test_the_order_of_a_spec_does_not_matter(spec: dict[str, Any], order: random.Random) -> None:
    items = list(spec.items())
    order.shuffle(items)
    one, other = (request_key(arch="sm_90a", spec=given, generator="g") for given in (spec, dict(items)))
    assert one == other


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"source": "f\0g"}, ValueError),
        ({"options": ("-D\0",)}, ValueError),
        ({"source": "\ud800"}, ValueError),
        ({"arch": "90a"}, ValueError),
        ({"arch": "sm_90a "}, ValueError),
        ({"arch": "../sm_90a"}, ValueError),
        ({"options": "-arch=sm_90a"}, TypeError),
        ({"options": (b"-a",)}, TypeError),
        ({"source": b"f"}, TypeError),
    ],
)
def test_parts_that_cannot_be_in_a_key(change: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        cache_key(**PARTS | change)


@pytest.mark.parametrize("spec", [{"a": {1, 2}}, {1: "a"}, {"a": b"x"}, {"a": object()}])
def test_a_spec_holds_json_values_only(spec: dict[Any, Any]) -> None:
    with pytest.raises(TypeError):
        request_key(arch="sm_90a", spec=spec, generator="g")


@pytest.mark.parametrize("spec", [{"a": float("nan")}, {"a": float("inf")}, {"\ud800": 1}, {"a": "\ud800"}])
def test_a_spec_holds_no_value_that_json_cannot_write(spec: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        request_key(arch="sm_90a", spec=spec, generator="g")


def test_what_is_no_digest() -> None:
    digest = "0123456789abcdef" * 4
    bad = [digest[:-1], digest + "0", digest.upper(), digest + "\n", "\n" + digest[1:], digest.replace("0", "\u0660"),
           "../" + digest[3:], digest[:-1] + "\0", "", None, 5, digest.encode()]  # fmt: skip
    assert is_digest(digest)
    assert [text for text in bad if is_digest(text)] == []


def test_what_is_no_architecture() -> None:
    bad = ["sm_", "sm_0", "sm_9", "sm_90b", "sm_90aa", "SM_90A", "sm_90a\n", "sm_1234", "compute_90", "sm_٩٠", None]
    assert [text for text in bad if is_arch(text)] == []
    assert all(map(is_arch, itertools.chain(SEVEN_ARCHS, ["sm_89", "sm_110a"])))
