"""Rendered sources: deterministic, self-contained, named after their spec."""

import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlaprep.templates import render as render_module
from mlaprep.templates.arch import ARCHS, DEFAULT_ARCHS, Arch
from mlaprep.templates.errors import SpecError, TemplateError
from mlaprep.templates.precompile import COMPILED, compiled_text
from mlaprep.templates.presets import PRESETS, preset
from mlaprep.templates.render import check_target, render, templates_fingerprint
from mlaprep.templates.signature import kernel_parameters
from mlaprep.templates.spec import KernelSpec

TEMPLATES = Path(render_module.__file__).parent


def test_the_head_comment_names_the_spec() -> None:
    spec = KernelSpec(num_heads=12, dcp_world=4, dcp_interleave=64, cache_row_stride=640)
    head = render(spec).text.split("\n\n")[0]
    assert spec.variant_id in head.splitlines()[0]
    shown = " ".join(line.removeprefix("//").strip() for line in head.splitlines())
    for name, value in spec.to_dict().items():
        assert f"{name} {str(value).lower()}" in shown


def test_a_source_includes_nothing_and_holds_no_undefined_text() -> None:
    for heads, fields in ((1, {"rope_dim": 0, "write_kv": False}), (128, {"q_scale": "scalar", "reserved_slot": True})):
        text = render(KernelSpec.from_dict({"num_heads": heads, **fields})).text
        assert "#include" not in text
        assert not re.search(r"\{\{|\}\}(?!;)|\{%", text.replace("{{", "{{"))
        assert "None" not in text
        assert "Undefined" not in text
        assert max(map(len, text.splitlines())) <= 130


def test_no_read_takes_the_non_coherent_path_and_order_is_wait_then_release() -> None:
    text = render(KernelSpec(num_heads=12)).text
    code = "\n".join(line.split("//")[0] for line in text.splitlines())
    assert "ld.global.nc" not in code
    assert "__restrict__" not in code
    body = code[code.index('extern "C"') :]
    assert body.index("wait_for_predecessors") < body.index("load_elements") < body.index("release_dependents")
    assert body.index("release_dependents") < body.index("store_codes")
    without = render(KernelSpec(num_heads=12, pdl=False)).text
    assert "griddepcontrol" not in without


def test_the_parameter_list_is_the_signature() -> None:
    spec = KernelSpec(num_heads=12, reserved_slot=True, dcp_world=2, q_scale="scalar", cache_row_stride=576)
    text = render(spec).text
    declared = re.search(r"mla_prepare\((.*?)\)\s*\{", text, re.DOTALL)
    assert declared
    names = [line.split()[-1] for line in declared[1].replace("\n", " ").split(",")]
    assert names == [parameter.name for parameter in kernel_parameters(spec)]
    assert [tuple(entry) for entry in render(spec).launch["parameters"]] == [
        (parameter.name, parameter.type) for parameter in kernel_parameters(spec)
    ]
    assert json.loads(json.dumps(render(spec).launch)) == render(spec).launch
    assert "cache_row_stride" not in names


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 256), st.integers(1, 64), st.integers(0, 16))
def test_rendering_twice_gives_one_text(heads: int, rank: int, rope: int) -> None:
    spec = KernelSpec(num_heads=heads, kv_lora_rank=16 * rank, rope_dim=8 * rope)
    first = render(spec)
    render.cache_clear()
    assert render(spec).text == first.text
    assert render(spec).sha256 == first.sha256


def test_B036_sources_do_not_depend_on_hash_seed_or_field_order() -> None:
    program = (
        "import hashlib, json, sys\n"
        "from mlaprep.templates.render import render\n"
        "from mlaprep.templates.spec import KernelSpec\n"
        "digest = hashlib.sha256()\n"
        "for heads in range(1, 201):\n"
        "    fields = {'num_heads': heads, 'pdl': heads % 2 == 0, 'loc_dtype': 'i32', 'rope_dim': 64}\n"
        "    items = sorted(fields.items(), key=lambda item: hash(item[0]))\n"
        "    digest.update(render(KernelSpec.from_dict(dict(items))).text.encode())\n"
        "print(digest.hexdigest())\n"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("0", "1", "random")
    }
    assert len(seen) == 1


def test_B035_a_changed_template_or_jinja2_version_changes_every_source(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = KernelSpec(num_heads=12)
    before, fingerprint = render(spec).text, templates_fingerprint()
    files = {path.name: path.read_text() for path in TEMPLATES.glob("*.j2")}
    assert len(files) >= 4
    caches = (render, templates_fingerprint, render_module._environment)

    def again() -> str:
        for cache in caches:
            cache.cache_clear()
        return render(spec).text

    texts = {before}
    try:
        for name, text in files.items():
            changed = files | {name: text.replace("// ", "//  ", 1) if "// " in text else text + "\n"}
            monkeypatch.setattr(render_module, "_template_files", lambda changed=changed: changed)
            texts.add(again())
            assert templates_fingerprint() != fingerprint
        monkeypatch.setattr(render_module, "_template_files", lambda: files)
        monkeypatch.setattr(jinja2, "__version__", "0.0.test")
        texts.add(again())
    finally:
        monkeypatch.undo()
    assert again() == before
    assert len(texts) == 1 + len(files) + 1


def test_B054_no_caller_text_reaches_a_source() -> None:
    for value in ('bf16\n#include "/etc/passwd"\n', "{{7*7}}", "bf16\0x"):
        for field in ("dtype", "layout", "rope", "loc_dtype", "cache_row_stride"):
            with pytest.raises(SpecError):
                render(KernelSpec.from_dict({"num_heads": 12, field: value}))


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_divides_at_every_degree(name: str) -> None:
    model = preset(name)
    for tp in model.tp_degrees:
        assert model.num_heads % tp == 0
        spec = model.spec(tp)
        assert spec.num_heads == model.num_heads // tp
        assert (spec.kv_lora_rank, spec.rope_dim) == (model.kv_lora_rank, model.rope_dim)
        assert (spec.rope, spec.layout) == (model.rope, model.layout)
        assert render(spec).text
    for tp in (0, 3, True, "8", 1000):
        with pytest.raises(SpecError, match="tp"):
            model.spec(tp)  # type: ignore[arg-type]


def test_an_unknown_preset_gets_the_nearest_names() -> None:
    with pytest.raises(SpecError, match=r"kimi-k3|kimi-k2"):
        preset("kimi-k")
    with pytest.raises(SpecError, match="deepseek-v3"):
        preset("")


def test_B044_unknown_architectures_are_refused_with_the_known_ones() -> None:
    for name in ("sm_70", "sm_80", "sm_110a", "sm_123", "sm_90b", "90a", "sm_0", "sm_90a ", "SM_90A", "", None, 90):
        with pytest.raises(SpecError, match="sm_103a"):
            Arch(name)  # type: ignore[arg-type]


def test_B045_a_device_maps_to_a_target_exactly_or_to_none() -> None:
    mapped = {
        capability: Arch.for_device(capability)
        for capability in [(9, 0), (10, 0), (10, 3), (12, 0), (12, 1), (8, 9), (11, 0), (8, 0), (10, 1)]
    }
    assert {capability: str(arch) for capability, arch in mapped.items() if arch} == {
        (9, 0): "sm_90a",
        (10, 0): "sm_100a",
        (10, 3): "sm_103a",
        (12, 0): "sm_120a",
    }
    assert not Arch("sm_120a").runs_on((12, 1))
    assert Arch("sm_120f").runs_on((12, 1))
    assert Arch("sm_100f").runs_on((10, 3))
    assert not Arch("sm_103f").runs_on((10, 0))
    assert not Arch("sm_90a").runs_on((10, 0))
    assert all(arch.runs_on(arch.capability) for arch in ARCHS)
    assert set(DEFAULT_ARCHS) == {arch for arch in mapped.values() if arch}


def test_pdl_needs_an_architecture_that_has_it() -> None:
    with pytest.raises(SpecError, match="pdl"):
        check_target(KernelSpec(num_heads=12), Arch("sm_89"))
    check_target(KernelSpec(num_heads=12, pdl=False), Arch("sm_89"))
    check_target(KernelSpec(num_heads=12), Arch("sm_90"))


def test_wide_loads_need_an_architecture_that_has_them() -> None:
    spec = KernelSpec(num_heads=12, load_bytes=32)
    with pytest.raises(SpecError, match="load_bytes"):
        check_target(spec, Arch("sm_90a"))
    check_target(spec, Arch("sm_100a"))
    assert "ld.global.v8" in render(spec).text


@pytest.mark.parametrize(
    ("mistake", "line", "told"),
    [
        ("{{ nope }}", 3, "'nope' is undefined"),
        ("{% if %}", 1, "Expected an expression"),
        ("{{ 1 // 0 }}", 2, "ZeroDivisionError"),
        ('{% include "gone.j2" %}', 1, "gone.j2"),
    ],
)
@pytest.mark.parametrize("file", ["mla_prepare.cu.j2", "memory.cuh.j2"])
def test_a_mistake_in_a_template_is_told_with_name_and_line(
    monkeypatch: pytest.MonkeyPatch, file: str, mistake: str, line: int, told: str
) -> None:
    files = dict(render_module._template_files())
    files[file] = "\n" * (line - 1) + f"{mistake}\n{files[file]}"
    monkeypatch.setattr(render_module, "_template_files", lambda: files)
    monkeypatch.setattr(render_module, "_environment", render_module._environment.__wrapped__)
    monkeypatch.setattr(render_module, "templates_fingerprint", lambda: "0" * 64)
    with pytest.raises(TemplateError, match=re.escape(told)) as failure:
        render_module.render.__wrapped__(KernelSpec(num_heads=12))
    assert (failure.value.template, failure.value.line) == (file, line)
    assert f"{file}, line {line}" in str(failure.value)
    assert str(pickle.loads(pickle.dumps(failure.value))) == str(failure.value)


def test_compiled_templates_are_those_that_are_there() -> None:
    assert compiled_text() == COMPILED.read_text("utf-8"), "run `make templates`"


def test_compiled_templates_render_what_the_templates_do() -> None:
    parsed, compiled = render_module._environment(), render_module._compiled_environment()
    assert compiled is not None
    for spec in (
        KernelSpec(num_heads=12),
        KernelSpec(num_heads=5, pad_heads_to=8, rope="neox", dcp_world=2, reserved_slot=True, page_size=64),
        KernelSpec(num_heads=1, layout="ds_mla", rope="interleaved", q_scale="token", q_nope_token_stride=512),
        KernelSpec(num_heads=3, layout="same", dtype="fp16", write_q=False),
    ):
        context = render_module._context(spec)
        texts = {env.get_template("mla_prepare.cu.j2").render(context) for env in (parsed, compiled)}
        assert texts == {render(spec).text}


def test_rendering_parses_no_template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render_module, "_environment", lambda: pytest.fail("a template was parsed"))
    assert render_module.render.__wrapped__(KernelSpec(num_heads=12)) == render(KernelSpec(num_heads=12))


def test_templates_that_changed_since_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlaprep.templates.compiled.FINGERPRINT", "0" * 64)
    assert render_module._compiled_environment() is None
    assert render_module.render.__wrapped__(KernelSpec(num_heads=12)) == render(KernelSpec(num_heads=12))
