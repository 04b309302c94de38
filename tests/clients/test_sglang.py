"""The hook's manners: what it refuses, restores and leaves alone. That it is right is for ``make test-sglang``, which
drives the real backends; here a package of the same names stands in."""

import importlib
import logging
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlaprep.clients import sglang as hook
from mlaprep.clients import sglang_contract
from mlaprep.clients.errors import HookRefused, SpecError
from mlaprep.clients.sglang_contract import BACKEND, CUTEDSL, POOL, ReliedOn

FORWARD = """
    def {name}(self, q, k, v, layer, forward_batch, save_kv_cache=True, q_rope=None, k_rope=None, cos_sin_cache=None,
               is_neox=False, llama_4_scaling=None):
        return "own", q, save_kv_cache, q_rope
"""
SOURCES = {
    BACKEND: f"""
def mla_quantize_without_rope_for_fp8(q_nope, q_rope, k_nope, k_rope):
    return "quantised"
def get_parallel():
    return None
def get_in_autotune_dummy_run():
    return False
envs = None
class TRTLLMMLABackend:
    {FORWARD.format(name="forward_decode")}
    {FORWARD.format(name="forward_extend")}
""",
    CUTEDSL: f"""
from {BACKEND} import TRTLLMMLABackend, mla_quantize_without_rope_for_fp8
class CuteDslMLABackend(TRTLLMMLABackend):
    {FORWARD.format(name="forward_decode")}
""",
    POOL: """
class MLATokenToKVPool:
    def set_mla_kv_buffer(self, layer, loc_info, cache_k_nope, cache_k_rope, layer_id_override=None): ...
    def _write_mla_kv_buffer(self, dst_buffer, loc, cache_k_nope, cache_k_rope): ...
    def _scatter_mla_rows(self, dst_buffer, loc, cache_k_nope, cache_k_rope): ...
    def get_key_buffer(self, layer_id): ...
class HybridLinearKVPool:
    def set_mla_kv_buffer(self, layer, loc_info, cache_k_nope, cache_k_rope): ...
    def get_key_buffer(self, layer_id, scale=None): ...
""",
    "sglang.version": '__version__ = "0.5.23"\n',
}

Write = Callable[..., None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes the stand-in, with texts replaced; the hook takes what it says unreplaced for the version it knows."""

    def write(**replaced: str) -> None:
        for module, source in SOURCES.items():
            for old, new in replaced.items():
                source = source.replace(old, new)
            path = tmp_path / (module.replace(".", "/") + ".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source)
        for folder in {path.parent for path in tmp_path.rglob("*.py")} | set(tmp_path.rglob("*")):
            if folder.is_dir():
                (folder / "__init__.py").touch()
        PathFinder.invalidate_caches()

    def forget() -> None:
        hook.uninstall()
        for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
            del sys.modules[name]

    monkeypatch.syspath_prepend(tmp_path)
    forget()
    write()
    known = []
    for name in sglang_contract.RELIED_ON:
        value: Any = importlib.import_module(name.module)
        for part in name.name.split("."):
            value = getattr(value, part)
        digest = sglang_contract.source_digest(value)
        known.append(ReliedOn(name.module, name.name, sglang_contract.parameters_of(value), digest))
        assert name.parameters == known[-1].parameters
    monkeypatch.setattr(sglang_contract, "RELIED_ON", tuple(known))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    forget()
    for cached in tmp_path.rglob("*.pyc"):
        cached.unlink()
    importlib.import_module("linecache").clearcache()
    yield write
    forget()


def own_methods() -> tuple[Any, ...]:
    base: Any = importlib.import_module(BACKEND)
    cutedsl: Any = importlib.import_module(CUTEDSL)
    return (
        base.TRTLLMMLABackend.forward_decode,
        base.TRTLLMMLABackend.forward_extend,
        cutedsl.CuteDslMLABackend.forward_decode,
        base.mla_quantize_without_rope_for_fp8,
        cutedsl.mla_quantize_without_rope_for_fp8,
    )


def test_install_hooks_every_name_once_and_uninstall_puts_it_back(write: Write) -> None:
    before = own_methods()
    hook.install()
    hooked = own_methods()
    assert not set(before) & set(hooked)
    hook.install()
    assert own_methods() == hooked
    hook.uninstall()
    assert own_methods() == before
    assert hook.stats() == {}
    hook.install()
    assert not set(before) & set(own_methods())


def test_a_wrapper_put_on_later_is_kept_and_ours_beneath_it_does_nothing(write: Write) -> None:
    backend = importlib.import_module(BACKEND).TRTLLMMLABackend
    hook.install()
    ours = backend.forward_decode
    theirs = lambda *args, **named: ours(*args, **named)  # noqa: E731
    backend.forward_decode = theirs
    hook.uninstall()
    assert backend.forward_decode is theirs
    assert backend().forward_decode("q", "k", "v", None, None, q_rope="rope") == ("own", "q", True, "rope")


def test_what_is_not_decode_verify_or_draft_goes_to_sglang_untouched(write: Write) -> None:
    hook.install()
    mode = SimpleNamespace(is_target_verify=lambda: False, is_draft_extend_v2=lambda: False)
    backend = importlib.import_module(BACKEND).TRTLLMMLABackend()
    batch = SimpleNamespace(forward_mode=mode)
    assert backend.forward_extend("q", "k", "v", None, batch, False, q_rope="rope") == ("own", "q", False, "rope")
    assert importlib.import_module(BACKEND).mla_quantize_without_rope_for_fp8(1, 2, 3, 4) == "quantised"


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("is_neox=False", "is_neox=False, sinks=None", "forward_decode takes"),
        ('"own", q', '"own", 2 * q', "does something else"),
        ("def _scatter_mla_rows", "def _scatter_rows", "_scatter_mla_rows is not in"),
        ("class HybridLinearKVPool", "class HybridPool", "HybridLinearKVPool.get_key_buffer is not in"),
        ("def get_parallel():\n    return None", "get_parallel = None", "get_parallel is not in"),
    ],
)
def test_a_name_that_changed_is_refused_and_named(write: Write, old: str, new: str, told: str) -> None:
    write(**{old: new})
    before = own_methods()
    with pytest.raises(HookRefused, match="sglang runs unchanged") as refused:
        hook.install()
    assert any(told in change for change in refused.value.changes)
    assert own_methods() == before
    assert hook.stats() == {}


def test_a_version_nobody_proved_is_refused_though_no_name_differs(write: Write) -> None:
    write(**{"0.5.23": "0.5.24"})
    with pytest.raises(HookRefused, match=r"found version 0\.5\.24, the hook knows 0\.5\.23") as refused:
        hook.install()
    assert (refused.value.version, refused.value.changes) == ("0.5.24", ())


def test_no_sglang_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    with pytest.raises(HookRefused, match="cannot be imported"):
        hook.install()


def test_the_plugin_does_nothing_until_asked(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLAPREP_SGLANG", raising=False)
    finders = list(sys.meta_path)
    hook.plugin()
    assert sys.meta_path == finders
    assert not any(name.startswith("sglang") for name in sys.modules)
    monkeypatch.setenv("MLAPREP_SGLANG", "enabled")
    with pytest.raises(SpecError, match="MLAPREP_SGLANG"):
        hook.plugin()


def test_the_plugin_imports_nothing_and_hooks_modules_as_sglang_imports_them(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLAPREP_SGLANG", "1")
    finders = list(sys.meta_path)
    hook.plugin()
    assert not any(name.startswith("sglang") for name in sys.modules)
    methods = own_methods()
    assert all(hasattr(method, "__wrapped__") for method in methods)
    hook.uninstall()
    assert sys.meta_path == finders
    assert not any(hasattr(method, "__wrapped__") for method in own_methods())


def test_the_plugin_hooks_what_is_imported_already(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLAPREP_SGLANG", "1")
    own_methods()
    hook.plugin()
    assert all(hasattr(method, "__wrapped__") for method in own_methods())


def test_the_plugin_tells_of_an_unknown_version_and_lets_the_engine_run(
    write: Write, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(**{"0.5.23": "0.6.0"})
    monkeypatch.setenv("MLAPREP_SGLANG", "1")
    with caplog.at_level(logging.ERROR):
        hook.plugin()
        methods = own_methods()
    assert not any(hasattr(method, "__wrapped__") for method in methods)
    assert "found version 0.6.0" in caplog.text


def test_sglang_finds_the_plugin_by_its_entry_point() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, _, function = project["entry-points"]["sglang.srt.plugins"]["mlaprep"].partition(":")
    assert getattr(importlib.import_module(module), function) is hook.plugin


def test_importing_the_hook_imports_no_torch_and_no_sglang() -> None:
    code = "import sys, mlaprep.clients.sglang; print([n for n in ('torch', 'sglang', 'httpx') if n in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
