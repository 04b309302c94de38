"""Peers: how they are found, called and built, without a GPU and without any of them."""

import ctypes
import importlib.util
import subprocess
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import contenders  # noqa: E402
import peer_compile  # noqa: E402
import peer_flashinfer  # noqa: E402
import peer_sglang  # noqa: E402
import peer_vllm  # noqa: E402
import peers  # noqa: E402
import verdict  # noqa: E402
import workload  # noqa: E402
from fake_peers import one_set_of_peers  # noqa: E402
from kernels import argument_values  # noqa: E402


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> list[workload.Layer]:
    monkeypatch.setattr(workload, "CACHE_ROWS", 128)
    return workload.make_layers(workload.Cell(heads=2, tokens=3), workload.cache_pools(2, "cpu"), seed=7)


def test_a_missing_peer_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PEERS", tmp_path)
    monkeypatch.delenv(peer_sglang.ENVIRON, raising=False)
    for peer in (peer_sglang.Sglang(None, (9, 0)), peer_flashinfer.Flashinfer(None, (9, 0))):
        assert "fetch_peers" in peer.facts()["error"]
    sglang = peer_sglang.Sglang(None, (9, 0))
    for make in (lambda: sglang.kernel(True), sglang.scatter):
        with pytest.raises(peers.PeerMissing, match="fetch_peers"):
            make()


def test_a_build_that_fails_is_not_tried_again() -> None:
    once, tried = peers.Once(), []

    def make() -> None:
        tried.append(1)
        raise OSError("no compiler")

    for _ in range(3):
        with pytest.raises(peers.PeerMissing, match="OSError: no compiler"):
            once("key", make)
    assert len(tried) == 1
    assert once("other", lambda: 5) == once("other", lambda: 6) == 5


def test_a_library_is_named_after_all_that_goes_into_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PEERS", tmp_path)
    compiler = tmp_path / "nvcc"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho built > "$2"\n')
    compiler.chmod(0o755)
    monkeypatch.setattr(peers, "nvcc", lambda: str(compiler))
    tvm_ffi = peers.TvmFfi(tmp_path / "site", "1.0")

    def build(text: str = "a", flags: tuple[str, ...] = ("-O3",), include: str = "-I/x", digest: str = "d") -> Path:
        return peers.build_library("peer", {"m.cu": text}, flags, [include], tvm_ffi, digest)

    first = build()
    assert first.read_text() == "built\n"
    assert build(include="-I/elsewhere") == first, "where it was built does not matter"
    others = {build(text="b"), build(flags=("-O2",)), build(digest="e")}
    assert len(others | {first}) == 4
    assert not list((tmp_path / "build").glob("*.part"))

    compiler.write_text("#!/bin/sh\necho refused >&2\nexit 1\n")
    with pytest.raises(peers.PeerMissing, match="refused"):
        build(text="c")


def test_flashinfer_is_given_what_its_own_wrapper_gives(
    layers: list[workload.Layer], monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = workload.make_layers(workload.Cell(2, 3, True), workload.cache_pools(2, "cpu"), seed=7)
    due = workload.make_due(layers)
    with one_set_of_peers(monkeypatch):
        flashinfer, sglang = peer_flashinfer.Flashinfer(None, (9, 0)), peer_sglang.Sglang(None, (9, 0))
        for body in (flashinfer.quantise_then(sglang.scatter()), flashinfer.append(layers)):
            workload.poison(layers, [layer.out for layer in layers])
            queries = [body(layer) for layer in layers]
            assert verdict.check(layers, queries, due).verdict == "equal"


def test_the_compiled_chain_is_made_once_a_cell_and_within_its_limit(
    layers: list[workload.Layer], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def compile_nothing(function: Any, **options: Any) -> Any:
        assert options == {"fullgraph": True, "dynamic": False}
        made.append(function.__code__.co_name)
        return function

    monkeypatch.setattr(torch, "compile", compile_nothing)
    due = workload.make_due(layers)
    chain = peer_compile.CompiledChain(limit_s=60)
    for cell in (workload.Cell(2, 3), workload.Cell(2, 4), workload.Cell(2, 3)):
        body = chain.body(cell, layers[0])
    workload.poison(layers, [])
    assert verdict.check(layers, [body(layer) for layer in layers], due).verdict in ("equal", "overflow")
    assert made == ["chain_0", "chain_1"]
    assert chain.facts(workload.Cell(2, 3))["form"] == "bytes"
    with pytest.raises(peers.PeerMissing, match="are spent"):
        peer_compile.CompiledChain(limit_s=-1).body(workload.Cell(2, 3), layers[0])


_SHIM = """
#include <cstdint>
#include <cstring>
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
struct Index { unsigned x; };
static Index threadIdx, blockIdx, blockDim;
static bool waited;
static int faults;
struct Vector { unsigned words[4]; };
static Vector load_vector(const unsigned short* a) { Vector v; std::memcpy(&v, a, 16); return v; }
static void store_codes(unsigned char* a, unsigned low, unsigned high) {
  if (!waited) ++faults;
  std::memcpy(a, &low, 4);
  std::memcpy(a + 4, &high, 4);
}
static float element_to_float(unsigned bits) { bits <<= 16; float f; std::memcpy(&f, &bits, 4); return f; }
static float value_of(unsigned code) {
  const int exponent = code >> 3 & 15, fraction = code & 7;
  return exponent ? (8 + fraction) * __builtin_ldexpf(1, exponent - 10) : fraction * __builtin_ldexpf(1, -9);
}
static unsigned encode(float v) {
  const unsigned sign = v < 0 ? 0x80 : 0;
  v = __builtin_fabsf(v);
  if (v >= 448) return sign | 0x7e;
  unsigned low = 0;
  while (value_of(low + 1) <= v) ++low;
  const float below = v - value_of(low), above = value_of(low + 1) - v;
  return sign | (below < above || (below == above && low % 2 == 0) ? low : low + 1);
}
static unsigned float_to_e4m3x4(float a, float b, float c, float d) {
  return encode(a) | encode(b) << 8 | encode(c) << 16 | encode(d) << 24;
}
static void wait_for_predecessors() { waited = true; }
static void release_dependents() { if (!waited) ++faults; }
"""


@pytest.mark.parametrize(("warps", "blocks_threads"), [(1, 3 * 3 * 32), (3, 3 * 3 * 3 * 32)])
def test_the_re_created_launch_writes_the_bytes_of_the_chain(
    layers: list[workload.Layer], tmp_path: Path, warps: int, blocks_threads: int
) -> None:
    source, library = tmp_path / "kernel.cc", tmp_path / "kernel.so"
    source.write_text(
        f'{_SHIM}\n#include "{peer_vllm.SOURCE}"\n'
        'extern "C" int run(unsigned blocks, void** a) { blockDim.x = 256; faults = 0;'
        " for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) for (threadIdx.x = 0; threadIdx.x < 256;"
        " ++threadIdx.x) { waited = false; one_launch((unsigned char*)a[0], (unsigned char*)a[1],"
        " (Element*)a[2], (Element*)a[3], (Element*)a[4], (Element*)a[5], (long long*)a[6], (float*)a[7],"
        " (float*)a[8], (unsigned)(uintptr_t)a[9], (long long)a[10], (long long)a[11], (long long)a[12],"
        " (long long)a[13], (long long)a[14], (long long)a[15], (long long)a[16]); } return faults; }\n"
    )
    defines = [f"-D{define}" for define in peer_vllm.defines(2, warps, True)]
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", *defines, str(source), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    run = ctypes.CDLL(str(library)).run

    due = workload.make_due(layers)
    workload.poison(layers, [layer.out for layer in layers])
    ones = torch.ones(1)
    for layer in layers:
        values = argument_values(layer) | {"q_scale": ones.data_ptr(), "kv_scale": ones.data_ptr()}
        packed = (ctypes.c_void_p * len(peer_vllm.PARAMETERS))(*(values[name] for name, _ in peer_vllm.PARAMETERS))
        assert run(-(-blocks_threads // 256), packed) == 0, "written ahead of the wait, or released ahead of it"
    assert verdict.check(layers, [layer.out for layer in layers], due).verdict == "equal"


def test_the_re_created_launch_has_the_warps_it_is_described_with() -> None:
    assert [peer_vllm.warps_a_row(tokens) for tokens in (1, 64, 65, 1024)] == [3, 3, 1, 1]
    assert peer_vllm.launch_config(workload.Cell(12, 1)).grid == (5, 1, 1)
    assert peer_vllm.launch_config(workload.Cell(128, 1024)).grid == (129 * 1024 // 8, 1, 1)


def test_five_launches_are_five(layers: list[workload.Layer]) -> None:
    due = workload.make_due(layers)
    workload.poison(layers, [])
    queries = [contenders.five_launches(layer) for layer in layers]
    assert verdict.check(layers, queries, due).verdict in ("equal", "overflow")  # by torch's version


if importlib.util.find_spec("triton"):  # GPU builds of torch bring it, and nothing else needs it

    def test_the_triton_version_addresses_what_the_chain_does(
        layers: list[workload.Layer], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        import peer_triton

        # Whole numbers up to 8 are exact: the interpreter rounds ties away from zero.
        for layer in layers:
            for tensor in layer[:4]:
                tensor.copy_(torch.randint(1, 9, tensor.shape))
        due = workload.make_due(layers)
        for _, body in peer_triton.bodies(pdl=False):
            workload.poison(layers, [layer.out for layer in layers])
            queries = [body(layer) for layer in layers]
            assert verdict.check(layers, queries, due).verdict == "equal"
