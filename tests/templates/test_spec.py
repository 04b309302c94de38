"""KernelSpec: what is accepted, what is refused and in which words, and its name."""

import dataclasses
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlaprep.templates.errors import SpecError
from mlaprep.templates.fields import STRIDE_FIELDS
from mlaprep.templates.schema import spec_json_schema
from mlaprep.templates.spec import VARIANT_ID_PATTERN, KernelSpec, parse_variant_id

strides = st.one_of(st.none(), st.just("dynamic"), st.integers(144, 2**37).map(lambda n: n * 8))
documents = st.fixed_dictionaries(
    {"num_heads": st.integers(1, 256)},
    optional={
        "kv_lora_rank": st.integers(1, 64).map(lambda n: 16 * n),
        "rope_dim": st.integers(0, 64).map(lambda n: 2 * n),
        "dtype": st.sampled_from(["bf16", "fp16", None]),
        "layout": st.sampled_from(["fp8", "fp8-q16", "same", "ds_mla"]),
        "query_dtype": st.sampled_from(["e4m3", "input", None]),
        "tile_scale": st.sampled_from(["none", "raw", "pow2", None]),
        "rope": st.sampled_from(["none", "interleaved", "neox"]),
        "position_dtype": st.sampled_from(["i32", "i64", None]),
        "pad_heads_to": st.one_of(st.none(), st.integers(1, 256)),
        "page_size": st.sampled_from([1, 16, 64]),
        "load_bytes": st.sampled_from([16, 32]),
        "loc_dtype": st.sampled_from(["i32", "i64", None]),
        "q_scale": st.sampled_from(["none", "scalar", "token", None]),
        "kv_scale": st.sampled_from(["none", "scalar", None]),
        "dcp_world": st.integers(1, 1024),
        "dcp_interleave": st.integers(1, 65536),
        "reserved_slot": st.booleans(),
        "pdl": st.booleans(),
        "elements_per_thread": st.sampled_from([2, 4, 8, 16, None]),
        "write_kv": st.booleans(),
        "write_q": st.booleans(),
        **dict.fromkeys(STRIDE_FIELDS, strides),
    },
)


def refusal(**fields: Any) -> SpecError:
    with pytest.raises(SpecError) as caught:
        KernelSpec.from_dict(fields)
    return caught.value


@given(documents)
def test_a_spec_and_its_variant_id_name_each_other(document: dict[str, Any]) -> None:
    try:
        spec = KernelSpec.from_dict(document)
    except SpecError:
        return
    assert parse_variant_id(spec.variant_id) == spec
    assert parse_variant_id(spec.variant_id).variant_id == spec.variant_id
    assert re.search(VARIANT_ID_PATTERN, spec.variant_id)
    assert KernelSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert KernelSpec.from_dict(dict(reversed(document.items()))) == spec


@given(documents, documents)
def test_two_specs_share_a_variant_id_only_if_they_are_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    try:
        first, second = KernelSpec.from_dict(one), KernelSpec.from_dict(other)
    except SpecError:
        return
    assert (first == second) == (first.variant_id == second.variant_id)


def test_the_variant_id_of_a_plain_spec_is_short() -> None:
    assert KernelSpec(num_heads=12).variant_id == "mla_prepare-h12-r512-d64-bf16-fp8-norope-i64-pdl"


def test_omitted_null_and_default_are_one_spec() -> None:
    spec = KernelSpec(num_heads=12)
    assert spec == KernelSpec.from_dict(
        {"num_heads": 12} | {name: None for name in spec.to_dict() if name != "num_heads"}
    )
    assert spec == KernelSpec.from_dict(spec.to_dict())
    assert spec == KernelSpec(num_heads=12, out_token_stride=12 * 576, out_head_stride=576)


def test_strides_that_cannot_matter_do_not_make_a_variant() -> None:
    one_head = KernelSpec(num_heads=1)
    assert one_head == KernelSpec(num_heads=1, q_nope_head_stride=8, q_rope_head_stride=4096, out_head_stride=640)
    assert KernelSpec(num_heads=2, rope_dim=0) == KernelSpec(num_heads=2, rope_dim=0, q_rope_token_stride=8)
    assert KernelSpec(num_heads=2, write_q=False) == KernelSpec(num_heads=2, write_q=False, out_token_stride="dynamic")
    assert KernelSpec(num_heads=2, write_kv=False) == KernelSpec(num_heads=2, write_kv=False, cache_row_stride=576)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_heads", True),
        ("num_heads", "16"),
        ("num_heads", 16.0),
        ("num_heads", 0),
        ("num_heads", -1),
        ("num_heads", 257),
        ("num_heads", 10**30),
        ("num_heads", float("nan")),
        ("kv_lora_rank", 500),
        ("kv_lora_rank", 10**6),
        ("kv_lora_rank", 0),
        ("rope_dim", 63),
        ("rope_dim", 136),
        ("dtype", "float32"),
        ("dtype", 'bf16\n#include "/etc/passwd"\n'),
        ("dtype", "{{7*7}}"),
        ("dtype", "bf16\0x"),
        ("dtype", ["bf16"]),
        ("layout", "e5m2"),
        ("loc_dtype", "i16"),
        ("elements_per_thread", 32),
        ("load_bytes", 8),
        ("page_size", 0),
        ("pad_heads_to", 11),
        ("elements_per_thread", "16"),
        ("pdl", 1),
        ("pdl", "yes"),
        ("write_q", 0),
        ("dcp_world", 0),
        ("dcp_interleave", 0),
        ("q_nope_token_stride", -8),
        ("q_nope_token_stride", 4),
        ("q_nope_token_stride", 2**41),
        ("q_nope_token_stride", "Dynamic"),
        ("cache_row_stride", 568),
        ("out_head_stride", 0),
        ("out_token_stride", 8),
    ],
)
def test_a_bad_field_is_named_with_its_range_and_not_echoed(field: str, value: object) -> None:
    error = refusal(**{"num_heads": 12, field: value})
    problem = error.problems[0]
    assert {problem.field for problem in error.problems} == {field}
    assert problem.allowed
    if isinstance(value, str):
        assert value not in problem.found


def test_every_bad_field_is_listed_at_once() -> None:
    assert [p.field for p in refusal(num_heads=0, rope_dim=63, pdl=1).problems] == ["num_heads", "rope_dim", "pdl"]


def test_unknown_and_missing_fields_are_named() -> None:
    (problem,) = refusal(num_heads=12, head_count=3).problems
    assert problem.field == "head_count"
    assert "num_heads" in problem.allowed
    (problem,) = refusal(**{"num_heads": 12, "\ud800\n": 3}).problems
    assert problem.field == "(unprintable name)"
    (problem,) = refusal(rope_dim=64).problems
    assert problem.field == "num_heads"
    for document in (None, [], "num_heads", 12):
        with pytest.raises(SpecError, match="an object"):
            KernelSpec.from_dict(document)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"write_q": False, "write_kv": False}, "write_q"),
        ({"write_kv": False, "reserved_slot": True}, "reserved_slot"),
        ({"write_kv": False, "dcp_world": 4}, "dcp_world"),
        ({"write_kv": False, "kv_scale": "scalar"}, "kv_scale"),
        ({"write_q": False, "q_scale": "scalar"}, "q_scale"),
        ({"dcp_interleave": 64}, "dcp_interleave"),
        ({"rope_dim": 8, "elements_per_thread": 16}, "elements_per_thread"),
        ({"cache_row_stride": 584}, "cache_row_stride"),
        ({"rope": "neox", "rope_dim": 0}, "rope"),
        ({"position_dtype": "i32"}, "position_dtype"),
        ({"query_dtype": "input"}, "query_dtype"),
        ({"tile_scale": "raw"}, "tile_scale"),
        ({"layout": "ds_mla", "kv_lora_rank": 320}, "kv_lora_rank"),
        ({"layout": "ds_mla", "rope_dim": 6}, "rope_dim"),
        ({"layout": "ds_mla", "tile_scale": "none"}, "tile_scale"),
        ({"layout": "ds_mla", "kv_scale": "scalar"}, "kv_scale"),
        ({"layout": "same", "kv_scale": "scalar"}, "kv_scale"),
        ({"layout": "ds_mla", "elements_per_thread": 2}, "elements_per_thread"),
        ({"elements_per_thread": 8, "load_bytes": 32}, "load_bytes"),
        ({"write_kv": False, "page_size": 64}, "page_size"),
        ({"write_q": False, "pad_heads_to": 16}, "pad_heads_to"),
        ({"dcp_world": 4, "dcp_interleave": 3, "page_size": 64}, "dcp_interleave"),
    ],
)
def test_fields_at_odds_are_refused(fields: dict[str, Any], named: str) -> None:
    assert named in [problem.field for problem in refusal(num_heads=12, **fields).problems]


WIDTHS = {
    (512, 64): True,
    (528, 64): True,
    (256, 64): True,
    (320, 32): True,
    (512, 0): True,
    (500, 64): False,
    (512, 63): False,
}


@pytest.mark.parametrize(("widths", "supported"), WIDTHS.items())
def test_B008_widths_that_a_thread_cannot_split_are_refused_by_the_spec(
    widths: tuple[int, int], supported: bool
) -> None:
    rank, rope_dim = widths
    if supported:
        assert KernelSpec(num_heads=4, kv_lora_rank=rank, rope_dim=rope_dim).row_width == rank + rope_dim
    else:
        assert refusal(num_heads=4, kv_lora_rank=rank, rope_dim=rope_dim).problems


def test_B012_impossible_dcp_worlds_are_refused() -> None:
    for fields in ({"dcp_world": 0}, {"dcp_world": -1}, {"dcp_world": 4, "dcp_interleave": 0}):
        assert refusal(num_heads=4, **fields).problems


def test_B017_strides_of_single_heads_do_not_enter_the_variant() -> None:
    ids = {KernelSpec(num_heads=1, q_nope_head_stride=stride).variant_id for stride in (8, 512, 4096)}
    assert len(ids) == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "..",
        "mla_prepare",
        "mla_prepare-h12",
        "MLA_PREPARE-h12-r512-d64-bf16-fp8-norope-i64-pdl",
        "mla_prepare-h012-r512-d64-bf16-fp8-norope-i64-pdl",
        "mla_prepare-h12-r512-d64-bf16-fp8-norope-i64-pdl\n",
        "mla_prepare-h12-r512-d64-bf16-fp8-norope-i64-pdl-",
        "mla_prepare-h12-r512-d64-bf16-fp8-norope-i64-pdl-dcp1x1",
        "mla_prepare-h12-r512-d64-bf16-fp8-norope-i64-pdl-ot6912",
        "mla_prepare-h1-r512-d64-bf16-fp8-norope-i64-pdl-qnh8",
        "mla_prepare-h\u0661\u0662-r512-d64-bf16-fp8-norope-i64-pdl",
        "mla_prepare-h0-r512-d64-bf16-fp8-norope-i64-pdl",
        "../../etc/passwd",
        "x" * 5000,
    ],
)
def test_only_canonical_variant_ids_parse(text: str) -> None:
    with pytest.raises(SpecError):
        parse_variant_id(text)


@given(st.text(max_size=80))
def test_no_text_breaks_the_parser(text: str) -> None:
    with pytest.raises(SpecError):
        parse_variant_id("mla_prepare-" + text + "?")


def test_the_pattern_of_variant_ids_is_one_for_json_schema() -> None:
    for name in (
        "",
        "-qe4m3-tspow2-posi32-qst-kvs-dcp8x64-res-pad16-pg64-e8-ld32-qnt6144-page0-row576-oh1152",
        "-qonly",
    ):
        assert re.search(VARIANT_ID_PATTERN, f"mla_prepare-h12-r512-d64-bf16-fp8-norope-i64-pdl{name}")
        assert not re.search(VARIANT_ID_PATTERN, f"mla_prepare-h12-r512-d64-bf16-fp8-norope-i64-pdl{name}-x")
    assert "(?P<" not in VARIANT_ID_PATTERN


def test_the_schema_says_what_the_constructor_does() -> None:
    schema = spec_json_schema()
    assert set(schema["properties"]) == {field.name for field in dataclasses.fields(KernelSpec)}
    assert schema["additionalProperties"] is False
    assert schema["properties"]["num_heads"] == {
        "type": "integer",
        "minimum": 1,
        "maximum": 256,
        "description": "an integer from 1 to 256",
    }


def test_a_spec_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        KernelSpec(num_heads=12).num_heads = 13  # type: ignore[misc]
