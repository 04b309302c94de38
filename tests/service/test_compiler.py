"""The compiler: what it makes, what it refuses, and what it survives."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from service_kit import children_of, is_alive, wait_for

from mlaprep.kernels_cache.artifact import KernelArtifact
from mlaprep.kernels_cache.key import cache_key, canonical_json
from mlaprep.service.child import CompileChild, child_environment
from mlaprep.service.compiler import Compiler
from mlaprep.service.errors import (
    BuilderClosed,
    CompileCrashed,
    CompileFailed,
    CompilerUnavailable,
    CompileTimeout,
    QueueFull,
)
from mlaprep.service.toolchain import Toolchain, buildable_archs, compile_options, conflicts, installed_nvrtc_version
from mlaprep.templates.arch import Arch
from mlaprep.templates.render import KernelSource, render
from mlaprep.templates.spec import KernelSpec

SM_90A = Arch("sm_90a")
SLOW = "".join(f"x = sinf(x) * a[{i}];\n" for i in range(500))
SLOW = f'extern "C" __global__ void mla_prepare(float* a) {{ float x = a[0]; {SLOW} a[0] = x; }}'
"""Minutes of ptxas from a few kilobytes."""
HUGE = '__device__ char a[1u << 30] = {1}; extern "C" __global__ void mla_prepare() {}'
HUGE_TEXT = "\n".join(
    ['#define A0 "0123456789abcdef"']
    + [f"#define A{i + 1} A{i} A{i} A{i} A{i}" for i in range(12)]
    + ['__device__ const char* s = A12; extern "C" __global__ void mla_prepare() {}']
)


def source_of(text: str) -> KernelSource:
    return KernelSource(KernelSpec(num_heads=12), text)


def fake_child(body: str) -> list[str]:
    """A child that greets like a compiler, then does this with every request."""
    code = f"""
import os, sys, time, signal
from mlaprep.service.frames import Channel
channel = Channel(0, 1)
channel.send({{"version": "12.9.86", "capabilities": [90], "library": "libnvrtc"}})
while True:
    request, source = channel.receive()
{body}
"""
    return [sys.executable, "-c", code]


def test_a_kernel_is_whole_and_described(compiler: Compiler, spec: KernelSpec, arch: Arch) -> None:
    artifact = compiler.compile(render(spec), arch)
    artifact.verify(arch=arch.name, spec=spec.to_dict())
    manifest = artifact.manifest
    assert manifest.variant_id == spec.variant_id
    assert manifest.entry == "mla_prepare"
    assert canonical_json(manifest.launch) == canonical_json(render(spec).launch)
    assert manifest.options == compile_options(arch)
    assert manifest.nvrtc_version == compiler.version()
    assert 8 <= manifest.registers <= 64
    assert (manifest.spill_stores, manifest.spill_loads, manifest.stack_bytes, manifest.shared_bytes) == (0, 0, 0, 0)
    assert 0 < manifest.compile_ms < 5000


def test_version_names_the_build(compiler: Compiler) -> None:
    """As the library's own preprocessor has it, and the wheel that it came in."""
    assert compiler.version().count(".") == 2
    assert installed_nvrtc_version() in (None, compiler.version())


def test_every_listed_architecture_compiles(compiler: Compiler) -> None:
    for arch in compiler.archs():
        source = render(KernelSpec(num_heads=12, pdl=arch.supports_pdl))
        compiler.compile(source, arch).verify(arch=arch.name)


def test_architectures_follow_the_compiler() -> None:
    old = Toolchain("12.8.93", (80, 89, 90, 100, 120), "libnvrtc.so.12")
    assert [str(arch) for arch in buildable_archs(old)] == [
        "sm_89",
        "sm_90",
        "sm_90a",
        "sm_100",
        "sm_100a",
        "sm_120",
        "sm_120a",
    ]
    assert buildable_archs(Toolchain("13.0.48", (75, 100), "")) == (Arch("sm_100"), Arch("sm_100a"), Arch("sm_100f"))


def test_B034_every_architecture_has_its_own_key_and_bytes(compiler: Compiler, spec: KernelSpec) -> None:
    names = ("sm_90", "sm_90a", "sm_100a", "sm_100f", "sm_103a", "sm_120a", "sm_121a")
    artifacts = [compiler.compile(render(spec), Arch(name)) for name in names]
    assert len({artifact.key for artifact in artifacts}) == 7
    assert len({artifact.digest for artifact in artifacts}) == 7
    assert [artifact.manifest.arch for artifact in artifacts] == list(names)


def test_B035_bytes_do_not_depend_on_where_and_who(
    compiler: Compiler, spec: KernelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = compiler.compile(render(spec), SM_90A)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USER", "somebody")
    moved = tmp_path / "elsewhere"
    moved.symlink_to(Path(sys.prefix), target_is_directory=True)
    command = [str(moved / "bin" / "python"), "-P", "-s", "-B", "-m", "mlaprep.service.compile_child"]
    with Compiler(processes=1, command=command) as other:
        there = other.compile(render(spec), SM_90A)
    assert there.key == here.key
    assert there.cubin == here.cubin


def test_B035_every_input_makes_a_new_key(compiler: Compiler, spec: KernelSpec) -> None:
    made = compiler.compile(render(spec), SM_90A).manifest
    parts = {
        "source": render(spec).text,
        "options": compile_options(SM_90A),
        "arch": "sm_90a",
        "nvrtc_version": made.nvrtc_version,
    }
    others = [
        parts | {"source": render(spec).text + " "},
        parts | {"options": (*compile_options(SM_90A), "-lineinfo")},
        parts | {"arch": "sm_90"},
        parts | {"nvrtc_version": "12.9.87"},
    ]
    keys = {made.key, *(cache_key(**changed) for changed in others)}  # type: ignore[arg-type]
    assert cache_key(**parts) == made.key  # type: ignore[arg-type]
    assert len(keys) == 5


def test_B040_no_toolkit_and_no_working_directory_is_searched(
    spec: KernelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: Compiler
) -> None:
    """Kernels need no header; a hostile one in the working directory or an old toolkit is never found."""
    for folder in (tmp_path, tmp_path / "include"):
        folder.mkdir(exist_ok=True)
        for name in ("cuda_fp8.h", "vector_types.h"):
            (folder / name).write_text("#error hostile\n")
    monkeypatch.chdir(tmp_path)
    for name in ("CUDA_PATH", "CUDA_HOME", "CPATH", "CPLUS_INCLUDE_PATH"):
        monkeypatch.setenv(name, str(tmp_path))
    with Compiler(processes=1) as fresh:
        assert fresh.compile(render(spec), SM_90A).cubin == compiler.compile(render(spec), SM_90A).cubin
        with pytest.raises(CompileFailed, match="cuda_fp8") as failure:
            fresh.compile(source_of('#include "cuda_fp8.h"\n' + render(spec).text), SM_90A)
        assert "hostile" not in str(failure.value)


def test_a_child_learns_nothing_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLAPREP_TOKEN", "secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    assert "secret" not in child_environment().values()
    with Compiler(processes=1) as compiler:
        compiler.version()
        (pid,) = compiler.state().pids
        environ = Path(f"/proc/{pid}/environ").read_bytes()
        assert Path(f"/proc/{pid}/cwd").resolve() == Path("/")
    assert b"secret" not in environ
    assert b"CUDA_PATH" not in environ


def test_a_source_with_nul_or_surrogate_is_refused(compiler: Compiler, spec: KernelSpec) -> None:
    for text in (render(spec).text + "\0// behind", render(spec).text + "\ud800"):
        with pytest.raises(CompileFailed, match=r"NUL|surrogate"):
            compiler.compile(source_of(text), SM_90A)


def test_a_refusal_carries_the_log(compiler: Compiler) -> None:
    with pytest.raises(CompileFailed) as failure:
        compiler.compile(source_of('extern "C" __global__ void mla_prepare() { nonsense; }'), SM_90A)
    assert 'identifier "nonsense" is undefined' in failure.value.log
    with pytest.raises(CompileFailed, match="no resource figures"):
        compiler.compile(source_of('extern "C" __global__ void other() {}'), SM_90A)


def test_usage_is_read_from_the_log(compiler: Compiler) -> None:
    text = """extern "C" __global__ void mla_prepare(const float* a, float* b) {
    __shared__ float s[32];
    float local[512];
    for (int i = 0; i < 512; i++) local[i] = a[i];
    s[threadIdx.x & 31] = a[threadIdx.x];
    __syncthreads();
    b[threadIdx.x] = s[(threadIdx.x + 1) & 31] + local[(int)a[3] & 511];
}"""
    manifest = compiler.compile(source_of(text), SM_90A).manifest
    assert manifest.shared_bytes == 128
    assert manifest.stack_bytes == 2048
    assert manifest.registers > 0


def test_a_slow_compile_is_killed_by_its_pid_and_replaced(spec: KernelSpec) -> None:
    with Compiler(processes=1, timeout_s=1.0) as compiler:
        compiler.version()
        (pid,) = compiler.state().pids
        began = time.monotonic()
        with pytest.raises(CompileTimeout, match="1 s"):
            compiler.compile(source_of(SLOW), SM_90A)
        assert time.monotonic() - began < 3
        assert not is_alive(pid)
        compiler.compile(render(spec), SM_90A)
        state = compiler.state()
        assert (state.timeouts, state.crashes, state.compiles) == (1, 0, 1)
        assert state.pids != (pid,)


def test_processor_time_is_limited_where_nobody_watches() -> None:
    code = "from mlaprep.service.compile_child import limit_cpu; limit_cpu(0.5)\nwhile True: pass"
    done = subprocess.run([sys.executable, "-c", code], timeout=30, check=False)
    assert done.returncode == -signal.SIGXCPU


@pytest.mark.parametrize("text", [HUGE, HUGE_TEXT], ids=["array", "macro"])
def test_memory_is_limited_and_never_held_against_the_source(text: str, spec: KernelSpec) -> None:
    with Compiler(processes=1, memory_bytes=700 * 2**20) as compiler:
        with pytest.raises(CompileCrashed):
            compiler.compile(source_of(text), SM_90A)
        assert compiler.state().crashes == 2
        compiler.compile(render(spec), SM_90A)


def test_a_dead_child_is_tried_again_once(spec: KernelSpec) -> None:
    with Compiler(processes=1) as compiler:
        compiler.version()
        (pid,) = compiler.state().pids
        os.kill(pid, signal.SIGKILL)
        compiler.compile(render(spec), SM_90A)
        assert compiler.state().crashes == 1
        assert not is_alive(pid)


def test_a_child_killed_while_it_compiles_is_tried_again(spec: KernelSpec, tmp_path: Path) -> None:
    compiling = tmp_path / "compiling"
    command = fake_child(f"    open({str(compiling)!r}, 'w').write(str(os.getpid())); time.sleep(60)")
    with Compiler(processes=1, timeout_s=20, command=command) as compiler:
        future = compiler.submit(render(spec), SM_90A)
        for _ in range(2):
            pid = int(wait_for(lambda: compiling.exists() and compiling.read_text()))
            compiling.unlink()
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(CompileCrashed, match="signal 9"):
            future.result(10)
        assert compiler.state().crashes == 2


@pytest.mark.parametrize(
    "body",
    [
        "    os._exit(3)",
        "    os.write(1, b'nonsense' * 9)",
        "    os.write(1, b'\\xff' * 8)",
        "    channel.send({'a': 1})",
        "    channel.send({'ok': True, 'compile_ms': None})",
    ],
    ids=["exits", "babbles", "huge-lengths", "odd-reply", "odd-figure"],
)
def test_a_child_that_makes_no_sense_is_given_up(body: str, spec: KernelSpec) -> None:
    with Compiler(processes=1, timeout_s=5, command=fake_child(body)) as compiler, pytest.raises(CompileCrashed):
        compiler.compile(render(spec), SM_90A)


def test_a_stopped_child_costs_the_deadline(spec: KernelSpec) -> None:
    """Also where the source does not fit the pipe and the child does not read."""
    command = fake_child("    time.sleep(60)")
    with Compiler(processes=1, timeout_s=0.5, command=command) as compiler:
        compiler.version()
        os.kill(compiler.state().pids[0], signal.SIGSTOP)
        with pytest.raises(CompileTimeout):
            compiler.compile(source_of("/" * 2**20), SM_90A)


def test_a_child_that_cannot_start_is_named(spec: KernelSpec) -> None:
    for command in (["/nonexistent/python"], [sys.executable, "-c", "raise SystemExit(7)"]):
        with Compiler(processes=1, command=command) as compiler:
            with pytest.raises(CompilerUnavailable, match="compile process"):
                compiler.compile(render(spec), SM_90A)
            assert compiler.state().status == "unavailable"


def test_a_full_queue_is_said(spec: KernelSpec) -> None:
    with Compiler(processes=1, timeout_s=20, queue_limit=2, command=fake_child("    time.sleep(60)")) as compiler:
        compiler.version()
        running = compiler.submit(render(spec), SM_90A)
        wait_for(lambda: compiler.state().queued == 0)
        waiting = [compiler.submit(render(spec), SM_90A) for _ in range(2)]
        with pytest.raises(QueueFull):
            compiler.compile(render(spec), SM_90A)
        compiler.close()
        for future in (running, *waiting):
            with pytest.raises(BuilderClosed):
                future.result(5)


def test_close_ends_every_child_and_is_final(spec: KernelSpec) -> None:
    compiler = Compiler(processes=2, timeout_s=60)
    compiler.start()
    pids = wait_for(lambda: len(compiler.state().pids) == 2 and compiler.state().pids)
    future = compiler.submit(source_of(SLOW), SM_90A)
    time.sleep(0.3)
    began = time.monotonic()
    compiler.close()
    compiler.close()
    assert time.monotonic() - began < 3
    assert not any(map(is_alive, pids))
    assert set(pids).isdisjoint(children_of(os.getpid()))
    with pytest.raises(BuilderClosed):
        future.result(1)
    with pytest.raises(BuilderClosed):
        compiler.compile(render(spec), SM_90A)
    assert compiler.state().status == "closed"


def test_a_child_ends_with_its_parent_even_in_a_compile() -> None:
    code = f"""
import sys
from mlaprep.service.compiler import Compiler
from mlaprep.templates.arch import Arch
from mlaprep.templates.render import KernelSource
from mlaprep.templates.spec import KernelSpec
compiler = Compiler(processes=1, timeout_s=60)
compiler.version()
compiler.submit(KernelSource(KernelSpec(num_heads=12), {SLOW!r}), Arch("sm_90a"))
print(*compiler.state().pids, flush=True)
sys.stdin.read()
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdin is not None
    (child,) = map(int, parent.stdout.readline().split())
    time.sleep(0.5)
    assert is_alive(child)
    parent.kill()
    parent.wait()
    parent.stdin.close()
    parent.stdout.close()
    wait_for(lambda: not is_alive(child))


def test_a_forked_copy_starts_its_own(spec: KernelSpec) -> None:
    with Compiler(processes=1) as compiler:
        compiler.version()
        (pid,) = compiler.state().pids
        child = os.fork()
        if child == 0:
            try:
                compiler.compile(render(spec), SM_90A)
                mine = compiler.state().pids
                compiler.close()
                os._exit(0 if pid not in mine else 3)
            except BaseException:
                os._exit(4)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert is_alive(pid)
        compiler.compile(render(spec), SM_90A)


def test_many_threads_share_the_pool(compiler: Compiler) -> None:
    def build(heads: int) -> KernelArtifact:
        return compiler.compile(render(KernelSpec(num_heads=heads)), SM_90A)

    with ThreadPoolExecutor(8) as threads:
        artifacts = list(threads.map(build, range(1, 13)))
    assert len({artifact.key for artifact in artifacts}) == 12


UNFORESEEN = [RuntimeError("can't start new thread"), SystemExit(1)]


@pytest.mark.parametrize("error", UNFORESEEN, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("place", ["__init__", "greet", "compile", "close"])
def test_nothing_that_goes_wrong_wears_the_pool_away(
    spec: KernelSpec, monkeypatch: pytest.MonkeyPatch, place: str, error: BaseException
) -> None:
    """Every call of the child's that the pool makes fails twice, in whatever way, and works after that."""
    real, left = getattr(CompileChild, place), [error, error]

    def failing(self: CompileChild, *arguments: Any, **options: Any) -> Any:
        if left:
            raise left.pop()
        return real(self, *arguments, **options)

    with Compiler(processes=1) as compiler:
        monkeypatch.setattr(CompileChild, place, failing)
        if place == "close":
            compiler.version()
            os.kill(compiler.state().pids[0], signal.SIGKILL)
        for _ in range(3):
            with contextlib.suppress(CompileCrashed):
                compiler.submit(render(spec), SM_90A).result(30)
        assert compiler.submit(render(spec), SM_90A).result(30).manifest.arch == "sm_90a"
        assert not left
        state = compiler.state()
        assert (state.queued, len(state.pids), len(compiler._threads)) == (0, 1, 1)
        assert children_of(os.getpid()).count(state.pids[0]) == 1


def test_where_no_thread_starts_a_compile_fails_at_once(spec: KernelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with Compiler(processes=1) as compiler:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            compiler.start()
            with pytest.raises(CompileCrashed, match="no thread"):
                compiler.compile(render(spec), SM_90A)
        assert compiler.compile(render(spec), SM_90A).manifest.arch == "sm_90a"


def test_B042_two_cupy_packages_are_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert conflicts(["numpy", "cupy-cuda12x", "Cupy_CUDA12x"]) == ()
    for name in ("cupy-cuda12x", "cupy-cuda13x"):
        folder = tmp_path / f"{name.replace('-', '_')}-14.2.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 14.2.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (warning,) = conflicts()
    assert "cupy-cuda12x and cupy-cuda13x" in warning
    assert "uninstall" in warning


def test_a_process_is_replaced_after_its_share_of_compiles(spec: KernelSpec, arch: Arch) -> None:
    with Compiler(processes=1, recycle_after=3) as compiler:
        pids = []
        for heads in range(1, 8):
            artifact = compiler.compile(render(KernelSpec(num_heads=heads)), arch)
            assert artifact.manifest.variant_id == KernelSpec(num_heads=heads).variant_id
            pids += [pid for pid in compiler.state().pids if pid not in pids]
        wait_for(lambda: compiler.state().recycled == 2 and len(compiler.state().pids) == 1)
        state = compiler.state()
        assert (state.compiles, state.crashes) == (7, 0)
        assert state.pids[0] not in pids[:1]
        assert not any(is_alive(pid) for pid in pids if pid not in state.pids)


def test_B054_a_source_cannot_read_files(compiler: Compiler, arch: Arch, tmp_path: Path) -> None:
    """No caller's text is ever a source; were one, the compiler could still open nothing."""
    secret = tmp_path / "secret.h"
    secret.write_text("the_secret_word")
    spec = KernelSpec(num_heads=12)
    for path in ("/etc/passwd", "/proc/self/environ", str(secret), "/dev/stdin"):
        text = f'#include "{path}"\n{render(spec).text}'
        source = dataclasses.replace(render(spec), text=text)
        with pytest.raises(CompileFailed) as failure:
            compiler.compile(source, arch)
        assert "cannot open source file" in failure.value.log or "could not open" in failure.value.log
        for word in ("root:", "the_secret_word", "MLAPREP"):
            assert word not in failure.value.log
    assert compiler.compile(render(spec), arch).manifest.registers > 0
