"""The builder: one compile a kernel, whoever asks, and what is remembered of failures."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from service_kit import wait_for

from mlaprep.kernels_cache.artifact import KernelArtifact
from mlaprep.kernels_cache.disk import DiskStore
from mlaprep.kernels_cache.key import cache_key, request_key
from mlaprep.kernels_cache.store import MemoryStore
from mlaprep.service import builder as builder_module
from mlaprep.service.builder import Builder
from mlaprep.service.compiler import Compiler
from mlaprep.service.errors import BuilderClosed, CompileCrashed, CompileFailed, CompilerUnavailable, QueueFull
from mlaprep.templates.arch import Arch
from mlaprep.templates.errors import SpecError
from mlaprep.templates.render import KernelSource, render, templates_fingerprint
from mlaprep.templates.spec import KernelSpec

BUILD_ONE = """
import json, sys
from pathlib import Path
from mlaprep.kernels_cache.disk import DiskStore
from mlaprep.service.builder import Builder
from mlaprep.templates.arch import Arch
from mlaprep.templates.spec import KernelSpec
with Builder(DiskStore(Path(sys.argv[1]))) as builder:
    print("here", flush=True)
    sys.stdin.readline()
    built = builder.get_or_compile(KernelSpec(num_heads=12), Arch("sm_100a"))
    started = builder.compiler.state().status != "idle"
    print(json.dumps([built.artifact.digest, started, builder.compiles]), flush=True)
"""


class ScriptedCompiler(Compiler):
    """A compiler whose outcome a test decides; everything else is the real one's."""

    def __init__(self, real: Compiler, outcome: Callable[[KernelSource, Arch], KernelArtifact]) -> None:
        super().__init__(processes=real.processes)
        self.real, self.outcome, self.calls = real, outcome, 0

    def toolchain(self) -> Any:
        return self.real.toolchain()

    def compile(self, source: KernelSource, arch: Arch) -> KernelArtifact:
        self.calls += 1
        return self.outcome(source, arch)


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    return DiskStore(tmp_path / "cache")


@pytest.fixture
def builder(store: DiskStore, compiler: Compiler) -> Iterator[Builder]:
    with Builder(store, compiler) as builder:
        yield builder


def test_the_second_time_it_is_there(builder: Builder, store: DiskStore, spec: KernelSpec, arch: Arch) -> None:
    assert builder.get(spec, arch) is None
    first = builder.get_or_compile(spec, arch)
    assert not first.cached
    again = builder.get_or_compile(spec, arch)
    assert again.cached
    assert again.artifact == first.artifact
    assert builder.get(spec, arch) == first.artifact
    assert builder.compiles == 1
    request = request_key(arch=arch.name, spec=spec.to_dict(), generator=templates_fingerprint())
    assert store.resolve(request) == first.artifact.key
    use = builder.use(spec, arch)
    assert use is not None
    assert use.count == 3


def test_a_hit_starts_no_process(builder: Builder, store: DiskStore, spec: KernelSpec, arch: Arch) -> None:
    builder.get_or_compile(spec, arch)
    with Compiler() as idle, Builder(store, idle) as other:
        assert other.get_or_compile(spec, arch).cached
        assert idle.state().status == "idle"


def test_B023_sixteen_threads_compile_once(builder: Builder, spec: KernelSpec, arch: Arch) -> None:
    barrier = threading.Barrier(16)

    def ask(_: int) -> tuple[str, bool]:
        barrier.wait()
        built = builder.get_or_compile(spec, arch)
        return built.artifact.digest, built.cached

    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(ask, range(16)))
    assert len({digest for digest, _ in answers}) == 1
    assert [cached for _, cached in answers].count(False) == 1
    assert builder.compiles == 1


def test_B023_sixteen_processes_compile_once(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    command = [sys.executable, "-c", BUILD_ONE, str(root)]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(16)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [json.loads(process.communicate(timeout=120)[0]) for process in processes]
    assert len({digest for digest, _, _ in answers}) == 1
    assert sum(compiles for _, _, compiles in answers) == 1
    assert [started for _, started, _ in answers].count(True) == 1  # the others never load NVRTC
    assert not list((root / "tmp").iterdir())


def test_another_process_holding_the_lock_costs_a_bounded_time(
    store: DiskStore, compiler: Compiler, spec: KernelSpec, arch: Arch
) -> None:
    """A lock saves work; who waits too long compiles all the same."""
    with Builder(MemoryStore(), compiler) as other:
        key = other.get_or_compile(spec, arch).artifact.key
    with Builder(store, compiler, lock_timeout_s=0.3) as builder, store.key_lock(key, 1.0) as held:
        assert held
        began = time.monotonic()
        assert not builder.get_or_compile(spec, arch).cached
        assert time.monotonic() - began < 5


def test_keys_that_others_hold_stall_no_other_kernel(store: DiskStore, compiler: Compiler, arch: Arch) -> None:
    """More of them than there are threads that build, and more than may wait at once."""
    held = [KernelSpec(num_heads=heads) for heads in range(1, 81)]
    with Builder(store, compiler, lock_timeout_s=3) as builder, contextlib.ExitStack() as locks:
        for spec in held:
            key = builder_module._key(render(spec), arch, compiler.version())
            assert locks.enter_context(store.key_lock(key, 0))
        flights = [builder.begin(spec, arch) for spec in held]
        began = time.monotonic()
        assert not builder.get_or_compile(KernelSpec(num_heads=128), arch).cached
        assert time.monotonic() - began < 2.9
        assert not any(flight.future.done() for flight in flights)
        # In the end they are compiled all the same.
        assert not any(flight.future.result(30).cached for flight in flights)
        wait_for(lambda: builder.stats().waiting == builder.stats().building == 0)


def test_what_another_process_built_meanwhile_is_taken(
    store: DiskStore, compiler: Compiler, spec: KernelSpec, arch: Arch
) -> None:
    with Builder(MemoryStore(), compiler) as other, Builder(store, compiler) as builder:
        artifact = other.get_or_compile(spec, arch).artifact
        with store.key_lock(artifact.key, 1.0):
            flight = builder.begin(spec, arch)
            time.sleep(0.2)
            store.publish(artifact)
        assert flight.settle(flight.future.result(10)).cached
        assert builder.compiles == 0


def test_a_refusal_is_remembered_for_a_while(compiler: Compiler, spec: KernelSpec, arch: Arch) -> None:
    def refuse(source: KernelSource, arch: Arch) -> KernelArtifact:
        raise CompileFailed("refused", "line 1: no")

    scripted = ScriptedCompiler(compiler, refuse)
    with Builder(MemoryStore(), scripted, negative_ttl_s=0.5) as builder:
        for _ in range(3):
            with pytest.raises(CompileFailed, match="line 1"):
                builder.get_or_compile(spec, arch)
        assert scripted.calls == 1
        assert builder.failed() == {(spec, arch)}
        assert builder.stats().remembered_failures == 2
        other = KernelSpec(num_heads=13)
        with pytest.raises(CompileFailed):
            builder.get_or_compile(other, arch)
        assert scripted.calls == 2
        time.sleep(0.6)
        assert builder.failed() == frozenset()
        scripted.outcome = compiler.compile
        assert not builder.get_or_compile(spec, arch).cached


@pytest.mark.parametrize(
    "error",
    [CompileCrashed("died"), CompilerUnavailable("libnvrtc", "hidden"), QueueFull(1)],
    ids=lambda e: type(e).__name__,
)
def test_what_says_nothing_of_the_kernel_is_not_remembered(
    error: Exception, compiler: Compiler, spec: KernelSpec, arch: Arch
) -> None:
    def fail(source: KernelSource, arch: Arch) -> KernelArtifact:
        raise error

    scripted = ScriptedCompiler(compiler, fail)
    with Builder(MemoryStore(), scripted) as builder:
        with pytest.raises(type(error)):
            builder.get_or_compile(spec, arch)
        scripted.outcome = compiler.compile
        assert not builder.get_or_compile(spec, arch).cached


def test_the_queue_is_bounded_over_different_kernels(compiler: Compiler, arch: Arch) -> None:
    release = threading.Event()

    def wait(source: KernelSource, arch: Arch) -> KernelArtifact:
        release.wait(10)
        raise CompileCrashed("released")

    with Builder(MemoryStore(), ScriptedCompiler(compiler, wait), queue_limit=4) as builder:
        threads = compiler.processes + 4
        flights = []
        for heads in range(1, 1 + threads):
            flights.append(builder.begin(KernelSpec(num_heads=heads), arch))
            wait_for(lambda: builder.stats().waiting == 0)
        flights += [builder.begin(KernelSpec(num_heads=100 + heads), arch) for heads in range(4)]
        with pytest.raises(QueueFull, match="4 kernels"):
            builder.begin(KernelSpec(num_heads=200), arch)
        # The same kernel again is no new work.
        assert not builder.begin(KernelSpec(num_heads=1), arch).leads
        release.set()
        for flight in flights:
            with pytest.raises(CompileCrashed):
                flight.future.result(10)


def test_close_fails_what_waits(compiler: Compiler, spec: KernelSpec, arch: Arch) -> None:
    builder = Builder(MemoryStore(), compiler)
    builder.close()
    builder.close()
    with pytest.raises(BuilderClosed):
        builder.get_or_compile(spec, arch)


def test_an_architecture_without_the_launch_attribute_is_refused(builder: Builder, spec: KernelSpec) -> None:
    for ask in (builder.get, builder.get_or_compile, builder.begin):
        with pytest.raises(SpecError, match="pdl"):
            ask(spec, Arch("sm_89"))
    assert not builder.get_or_compile(KernelSpec(num_heads=12, pdl=False), Arch("sm_89")).cached


def test_another_compiler_version_builds_anew(
    builder: Builder, compiler: Compiler, spec: KernelSpec, arch: Arch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old kernel stays, and serves only where there is no compiler."""
    old = builder.get_or_compile(spec, arch).artifact
    monkeypatch.setattr(builder_module, "installed_nvrtc_version", lambda: "12.9.99")
    idle = Compiler()
    with Builder(builder.store, idle) as other:
        assert other.get(spec, arch) is None
        idle._down, idle._down_until = CompilerUnavailable("libnvrtc", "hidden"), time.monotonic() + 60
        assert other.get(spec, arch) == old
        assert other.get_or_compile(spec, arch).cached
        with pytest.raises(CompilerUnavailable):
            other.get_or_compile(KernelSpec(num_heads=13), arch)
    monkeypatch.setattr(builder_module, "installed_nvrtc_version", lambda: None)
    with Builder(builder.store, Compiler()) as other:
        assert other.get(spec, arch) == old


def test_a_link_to_another_kernel_is_a_miss(
    builder: Builder, store: DiskStore, spec: KernelSpec, arch: Arch, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = builder.get_or_compile(KernelSpec(num_heads=13), arch).artifact
    request = request_key(arch=arch.name, spec=spec.to_dict(), generator=templates_fingerprint())
    store.link(request, other.key)
    monkeypatch.setattr(builder_module, "installed_nvrtc_version", lambda: None)
    with Builder(store, Compiler()) as blind:
        assert blind.get(spec, arch) is None


def test_a_link_to_the_same_spec_of_another_source_is_a_miss(
    builder: Builder, store: DiskStore, spec: KernelSpec, arch: Arch, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = builder.compiler.compile(KernelSource(spec, render(spec).text + "// and more\n"), arch)
    store.publish(other)
    request = request_key(arch=arch.name, spec=spec.to_dict(), generator=templates_fingerprint())
    store.link(request, other.key)
    monkeypatch.setattr(builder_module, "installed_nvrtc_version", lambda: None)
    with Builder(store, Compiler()) as blind:
        assert blind.get(spec, arch) is None


def test_B035_a_changed_template_is_a_new_key(
    builder: Builder, spec: KernelSpec, arch: Arch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One byte in the source, as a changed macro file or another jinja2 makes it."""
    first = builder.get_or_compile(spec, arch).artifact
    monkeypatch.setattr(builder_module, "render", lambda spec: KernelSource(spec, render(spec).text + "\n"))
    assert builder.get(spec, arch) is None
    second = builder.get_or_compile(spec, arch)
    assert not second.cached
    assert second.artifact.key != first.key


def test_B046_a_kernel_of_another_architecture_is_never_given_out(
    builder: Builder, store: DiskStore, compiler: Compiler, spec: KernelSpec
) -> None:
    """Its files under this key: refused by manifest and ELF, rebuilt."""
    wanted, other = Arch("sm_90a"), Arch("sm_100a")
    good = builder.get_or_compile(spec, wanted).artifact
    wrong = builder.get_or_compile(spec, other).artifact
    folder = store.root / wanted.name / good.key[:2] / good.key
    for name in ("kernel.cubin", "manifest.json"):
        content = (store.root / other.name / wrong.key[:2] / wrong.key / name).read_bytes()
        path = folder / name
        path.chmod(0o600)
        path.write_bytes(content)
    built = builder.get_or_compile(spec, wanted)
    assert not built.cached
    assert built.artifact.digest == good.digest
    assert store.stats().damaged >= 1


def test_keys_follow_from_what_is_compiled(builder: Builder, compiler: Compiler, spec: KernelSpec, arch: Arch) -> None:
    manifest = builder.get_or_compile(spec, arch).artifact.manifest
    assert manifest.key == cache_key(
        source=render(spec).text, options=manifest.options, arch=arch.name, nvrtc_version=compiler.version()
    )


def test_a_forked_copy_builds_for_itself(store: DiskStore, spec: KernelSpec, arch: Arch) -> None:
    """The parent's flights and locks are left to the parent."""
    with Compiler(processes=1) as compiler, Builder(store, compiler) as builder:
        builder.get_or_compile(spec, arch)
        builder.begin(KernelSpec(num_heads=40), arch)
        child = os.fork()
        if child == 0:
            try:
                built = builder.get_or_compile(KernelSpec(num_heads=40), arch)
                compiler.close()
                os._exit(0 if built.artifact.manifest.spec["num_heads"] == 40 else 3)
            except BaseException:
                os._exit(4)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
