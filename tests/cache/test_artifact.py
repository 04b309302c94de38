"""Manifest and artifact: values that are checked when made, and a proof that the parts belong together."""

import copy
import dataclasses
import json
import pickle
from typing import Any

import pytest
from cache.samples import make_artifact, synthetic_cubin
from hypothesis import given
from hypothesis import strategies as st

from mlaprep.kernels_cache.artifact import MAX_MANIFEST_BYTES, SEAL, KernelArtifact, Manifest, utc_now
from mlaprep.kernels_cache.errors import ArtifactError, CacheError

ARTIFACT = make_artifact()
MANIFEST = ARTIFACT.manifest
TEXT = MANIFEST.to_json()

text = st.text(st.characters(blacklist_categories=["Cs"]), max_size=10)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda children: st.lists(children, max_size=3) | st.dictionaries(text, children, max_size=3),
    max_leaves=8,
)
json_objects = st.dictionaries(text, json_values, max_size=5)
counts = st.integers(0, 2**63 - 1)
changes = st.fixed_dictionaries(
    {},
    optional={
        "variant_id": st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,40}", fullmatch=True).filter(str.isascii),
        "spec": json_objects,
        "launch": json_objects,
        "registers": counts,
        "spill_loads": counts,
        "shared_bytes": counts,
        "compile_ms": st.floats(0, 1e9),
        "options": st.lists(st.text("-=abc019_ ", min_size=1, max_size=20), max_size=5).map(tuple),
        "signature": st.none() | st.text("abcXYZ019+/=", min_size=1, max_size=88),
    },
)


def reason(text: object) -> str | None:
    try:
        Manifest.from_json(text)  # type: ignore[arg-type]
    except ArtifactError as error:
        return error.reason
    return None


def document(**changes: Any) -> str:
    return json.dumps(MANIFEST.to_dict() | changes)


@given(changes)
def test_manifest_round_trip(changes: dict[str, Any]) -> None:
    manifest = dataclasses.replace(MANIFEST, **changes)
    again = Manifest.from_json(manifest.to_json(), sealed=True)
    assert again == manifest
    assert again.to_json() == manifest.to_json()
    assert Manifest.from_dict(manifest.to_dict()) == manifest
    assert Manifest.from_json(json.dumps(manifest.to_dict())) == manifest
    assert Manifest.from_json(manifest.to_json().encode()) == manifest


def test_the_largest_manifest_can_be_read_back() -> None:
    part = {"text": "\u2028" * 2500, "lists": [[] for _ in range(200)]}
    manifest = dataclasses.replace(MANIFEST, spec=part, launch=part, options=('"' * 128,) * 32)
    assert len(manifest.to_json()) <= MAX_MANIFEST_BYTES
    assert Manifest.from_json(manifest.to_json(), sealed=True) == manifest


def test_a_manifest_keeps_copies_of_its_own() -> None:
    spec = {"strides": [1, 2]}
    manifest = dataclasses.replace(MANIFEST, spec=spec)
    spec["strides"].append(3)
    manifest.to_dict()["spec"]["strides"].append(4)
    assert manifest.to_dict()["spec"] == {"strides": [1, 2]}


def test_nobody_changes_what_others_hold() -> None:
    """One manifest serves the store, the memory tier and every handle of a process."""
    part = {"pdl": True, "parameters": [["q_out", "pointer"]], "inner": {"deep": [{}]}}
    manifest = dataclasses.replace(MANIFEST, spec=part, launch=part)
    for mapping in (manifest.spec, manifest.launch, manifest.spec["inner"], manifest.launch["inner"]["deep"][0]):
        with pytest.raises(TypeError):
            mapping["num_heads"] = 1
        assert not hasattr(mapping, "update")
    for sequence in (manifest.launch["parameters"], manifest.launch["parameters"][0], manifest.spec["inner"]["deep"]):
        assert isinstance(sequence, tuple)
    assert json.loads(manifest.to_json())["launch"] == manifest.to_dict()["launch"] == part
    for again in (pickle.loads(pickle.dumps(manifest)), copy.copy(manifest), copy.deepcopy(manifest)):
        assert again == manifest
        assert again.to_json() == manifest.to_json()
    assert manifest == Manifest.from_json(manifest.to_json(), sealed=True)
    assert manifest != dataclasses.replace(manifest, launch=part | {"pdl": False})


def test_every_flipped_bit_of_a_sealed_manifest_shows() -> None:
    data = TEXT.encode()
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            manifest = Manifest.from_json(bytes(flipped), sealed=True)
        except ArtifactError:
            continue
        assert manifest == MANIFEST, f"bit {bit} changed the manifest unnoticed"


def test_every_truncation_of_a_manifest_shows() -> None:
    assert {reason(TEXT[:length]) for length in range(len(TEXT))} == {"manifest"}


def test_a_seal_is_asked_for_where_it_must_be() -> None:
    assert SEAL in json.loads(TEXT)
    assert reason(document()) is None
    for missing in (document(), document(**{SEAL: None}), document(**{SEAL: 5}), "[]", "null", '"x"'):
        with pytest.raises(ArtifactError) as caught:
            Manifest.from_json(missing, sealed=True)
        assert caught.value.reason == "manifest-digest"
    assert reason(document(**{SEAL: "0" * 64})) == "manifest-digest"


@pytest.mark.parametrize(
    "changes",
    [
        {"variant_id": ""},
        {"variant_id": "../x"},
        {"variant_id": "a\nb"},
        {"variant_id": "x" * 513},
        {"variant_id": 5},
        {"variant_id": None},
        {"spec": []},
        {"spec": None},
        {"spec": {"a": "\ud800"}},
        {"spec": {"a": "x" * 20000}},
        {"spec": {"a": 2**63}},
        {"spec": {"a": [[[[]]]] * 100}},
        {"launch": "x"},
        {"arch": "90a"},
        {"arch": "sm_90a\n"},
        {"key": "0" * 63},
        {"key": "A" * 64},
        {"cubin_sha256": None},
        {"cubin_size": 0},
        {"cubin_size": -1},
        {"cubin_size": True},
        {"cubin_size": 100.0},
        {"cubin_size": "100"},
        {"cubin_size": 2**30},
        {"entry": "f; rm"},
        {"entry": "9f"},
        {"registers": True},
        {"registers": -1},
        {"registers": 2**63},
        {"nvrtc_version": "12.9.86\n"},
        {"nvrtc_version": ""},
        {"options": "-arch=sm_90a"},
        {"options": [1]},
        {"options": ["-D\0"]},
        {"options": ["é"]},
        {"options": ["-D{"]},
        {"options": [""]},
        {"options": ["-a"] * 65},
        {"options": ["x" * 256] * 20},
        {"compile_ms": -1},
        {"compile_ms": True},
        {"compile_ms": "1"},
        {"compile_ms": 10**400},
        {"created_at": "2026-13-31T12:00:00Z"},
        {"created_at": "2026-01-31 12:00:00Z"},
        {"created_at": "2026-01-31T12:00:00+02:00"},
        {"created_at": 1},
        {"signature": ""},
        {"signature": "a b"},
        {"signature": "x" * 2000},
        {"unknown": 1},
    ],
)
def test_members_that_are_not_allowed(changes: dict[str, Any]) -> None:
    assert reason(document(**changes)) == "manifest"
    if "unknown" not in changes:
        with pytest.raises(ArtifactError, match=r"manifest"):
            dataclasses.replace(MANIFEST, **changes)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_json_cannot_write(value: float) -> None:
    for changes in ({"compile_ms": value}, {"spec": {"a": value}}):
        with pytest.raises(ArtifactError):
            dataclasses.replace(MANIFEST, **changes)  # type: ignore[arg-type]
        assert reason(document(**changes)) == "manifest"


@pytest.mark.parametrize("schema", [0, 2, True, "1", 1.0, None])
def test_other_schemas_are_refused(schema: Any) -> None:
    assert reason(document(schema=schema)) == "schema"


@pytest.mark.parametrize(
    "name", sorted({item.name for item in dataclasses.fields(Manifest) if item.init} - {"signature"})
)
def test_missing_members_are_named(name: str) -> None:
    members = MANIFEST.to_dict()
    del members[name]
    with pytest.raises(ArtifactError, match=name):
        Manifest.from_dict(members)


@pytest.mark.parametrize(
    "hostile",
    [
        b"",
        b"\xff\xfe",
        b"null",
        b"[]",
        b"{",
        b"[" * 100_000,
        b'{"a":' * 20_000,
        b"[" * 990 + b"]" * 990,
        TEXT.replace("12.9.86", "\\ud800"),
        TEXT.replace('"registers":32', '"registers":NaN'),
        TEXT.replace('"registers":32', '"registers":1e400'),
        TEXT.replace('"registers":32', '"registers":' + "9" * 5000),
        TEXT.replace('"registers":32', '"registers":32,"registers":32'),
        TEXT.replace('"layout"', '"pdl"'),
        TEXT + " " * MAX_MANIFEST_BYTES,
        TEXT + "x",
        "\ud800",
    ],
    ids=range(17),
)
def test_hostile_texts_are_refused_with_our_error(hostile: bytes | str) -> None:
    assert hostile != TEXT
    assert reason(hostile) in {"manifest", "manifest-digest"}


@given(st.binary(max_size=200) | st.text(max_size=200) | json_values.map(json.dumps))
def test_any_text_is_refused_with_our_error(anything: bytes | str) -> None:
    assert reason(anything) is not None


@given(st.dictionaries(st.sampled_from([*MANIFEST.to_dict(), SEAL, "x"]), json_values, min_size=1, max_size=4))
def test_any_member_is_taken_or_refused_with_our_error(changes: dict[str, Any]) -> None:
    try:
        manifest = Manifest.from_dict(MANIFEST.to_dict() | changes)
    except ArtifactError:
        return
    assert Manifest.from_json(manifest.to_json(), sealed=True) == manifest


def test_the_error_is_in_both_trees() -> None:
    for parent in (CacheError, ValueError):
        with pytest.raises(parent):
            Manifest.from_json("")


def test_utc_now_is_what_a_manifest_takes() -> None:
    assert dataclasses.replace(MANIFEST, created_at=utc_now()).created_at.endswith("Z")


def test_a_whole_artifact_verifies() -> None:
    spec = dict(reversed(list(MANIFEST.spec.items())))
    ARTIFACT.verify()
    ARTIFACT.verify(key=ARTIFACT.key, arch="sm_90a", spec=spec)
    assert (ARTIFACT.key, ARTIFACT.digest) == (MANIFEST.key, MANIFEST.cubin_sha256)
    assert "cubin=" not in repr(ARTIFACT)


def with_manifest(**changes: Any) -> KernelArtifact:
    return dataclasses.replace(ARTIFACT, manifest=dataclasses.replace(MANIFEST, **changes))


@pytest.mark.parametrize(
    ("artifact", "expected"),
    [
        (dataclasses.replace(ARTIFACT, cubin=ARTIFACT.cubin[:-1]), "cubin-size"),
        (dataclasses.replace(ARTIFACT, cubin=ARTIFACT.cubin[:-1] + b"\1"), "cubin-digest"),
        (dataclasses.replace(ARTIFACT, source=ARTIFACT.source + " "), "source-digest"),
        (dataclasses.replace(ARTIFACT, source="\ud800"), "source-digest"),
        (dataclasses.replace(ARTIFACT, source="x" * (4 * 2**20 + 1)), "source-size"),
        (with_manifest(key="0" * 64), "key-mismatch"),
        (with_manifest(nvrtc_version="12.9.79"), "key-mismatch"),
        (with_manifest(options=("-std=c++17",)), "key-mismatch"),
        (with_manifest(arch="sm_90"), "key-mismatch"),
        (make_artifact(cubin=synthetic_cubin("sm_100a")), "wrong-arch"),
        (make_artifact(cubin=synthetic_cubin(machine=62)), "wrong-machine"),
        (make_artifact(cubin=b"not a cubin"), "not-elf"),
        (make_artifact(cubin=synthetic_cubin()[:-1]), "truncated"),
    ],
)
def test_parts_that_do_not_belong_together(artifact: KernelArtifact, expected: str) -> None:
    with pytest.raises(ArtifactError) as caught:
        artifact.verify()
    assert caught.value.reason == expected


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"key": "0" * 64}, "wrong-key"),
        ({"arch": "sm_90"}, "wrong-arch"),
        ({"arch": "sm_100a"}, "wrong-arch"),
        ({"spec": {}}, "wrong-spec"),
        ({"spec": MANIFEST.spec | {"num_heads": 13}}, "wrong-spec"),
        ({"spec": MANIFEST.spec | {"pdl": 1}}, "wrong-spec"),
        ({"spec": MANIFEST.spec | {"num_heads": 12.0}}, "wrong-spec"),
        ({"spec": MANIFEST.spec | {"more": None}}, "wrong-spec"),
    ],
)
def test_B038_what_was_not_asked_for_is_refused(asked: dict[str, Any], expected: str) -> None:
    with pytest.raises(ArtifactError) as caught:
        ARTIFACT.verify(**asked)
    assert caught.value.reason == expected


def test_B046_a_family_cubin_passes_for_its_own_name_only() -> None:
    family = make_artifact(arch="sm_100f")
    assert family.cubin == make_artifact(arch="sm_100").cubin
    family.verify(arch="sm_100f")
    with pytest.raises(ArtifactError, match="asked for 'sm_100', found sm_100f"):
        family.verify(arch="sm_100")


def test_a_part_that_is_too_deep_to_write_again_is_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_deep(value: object) -> str:
        raise RecursionError

    text = make_artifact().manifest.to_json()
    monkeypatch.setattr("mlaprep.kernels_cache.json_text.write_json", too_deep)
    with pytest.raises(ArtifactError, match="holds what JSON cannot"):
        Manifest.from_json(text, sealed=True)
