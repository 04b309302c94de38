"""The compile child: a process that owns NVRTC and turns sources into cubins, one at a time.

``python -m mlaprep.service.compile_child MEMORY_BYTES CPU_SECONDS`` speaks :mod:`mlaprep.service.frames` on
its standard streams. It greets with what it can do, then answers every request. It never touches a GPU, so
it runs where there is no driver. It has no include path, and by the time it compiles it cannot open a file: a source
stands for itself.
"""

import contextlib
import math
import os
import queue
import re
import resource
import sys
import threading
import time
from typing import Any, Final

from mlaprep.service.frames import Channel

PROGRAM_NAME: Final = "mla_prepare.cu"
"""What the compiler calls the source, the same for all, since a name may end in the binary."""

_OUT_OF_MEMORY: Final = "NVRTC_ERROR_OUT_OF_MEMORY"
_FRONT_END_OUT_OF_MEMORY: Final = "catastrophic error: out of memory"  # under NVRTC_ERROR_COMPILATION
# The compiler's own build number is in no function of its interface; only its preprocessor tells. One is
# added since PTX does not spell an initial value of 0, and 13.0 has a minor version of 0.
_VERSION_PROBE: Final = """extern "C" {
__device__ int probe_major = __CUDACC_VER_MAJOR__ + 1;
__device__ int probe_minor = __CUDACC_VER_MINOR__ + 1;
__device__ int probe_build = __CUDACC_VER_BUILD__ + 1;
}
"""
_PROBED: Final = re.compile(r"probe_(major|minor|build) = (\d+)")
_MISSING_BUILTINS: Final = re.compile(r"failed to open (libnvrtc-builtins[\w.]*)")


def main(arguments: list[str]) -> None:
    """Serve until the parent closes the pipe or dies."""
    memory_bytes, cpu_s = int(arguments[0]), float(arguments[1])
    # Whatever a library prints must not end up between two messages.
    reply_fd = os.dup(1)
    with open(os.devnull, "wb") as devnull:
        os.dup2(devnull.fileno(), 1)
    channel = Channel(0, reply_fd)
    limit_process(memory_bytes)
    greeting, nvrtc = _open_compiler()
    deny_files()
    requests: queue.SimpleQueue[tuple[dict[str, Any], bytes]] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(channel, requests), daemon=True).start()
    channel.send(greeting)
    while True:
        request, source = requests.get()
        limit_cpu(cpu_s)
        header, cubin = _answer(nvrtc, source.decode(), tuple(request["options"]))
        channel.send(header, cubin)


def limit_process(memory_bytes: int) -> None:
    """Bound the address space, and leave nothing behind: no core, no file."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def deny_files() -> None:
    """From here on the process opens nothing: no file, no library, no socket, whatever a source includes.

    NVRTC 12.9 and 13.5 have loaded all they need once they have compiled the version probe. Descriptors that are open
    stay; the three lowest numbers are taken, so none is left below the limit. A poll may name as many.
    """
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))


def limit_cpu(cpu_s: float) -> None:
    """Give the process this much more CPU time; past it the kernel kills it."""
    used = time.process_time()
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used + cpu_s), hard))


def _read_requests(channel: Channel, requests: "queue.SimpleQueue[tuple[dict[str, Any], bytes]]") -> None:
    # NVRTC compiles without the interpreter's lock, so this thread sees the parent's end at once, even in
    # the middle of a compile: no child outlives its parent, whatever killed that one.
    with contextlib.suppress(EOFError, OSError):
        while True:
            requests.put(channel.receive())
    os._exit(0)


def _open_compiler() -> tuple[dict[str, Any], Any]:
    """The greeting, and the compiler where there is one."""
    try:
        from cupy.cuda import nvrtc
    except ImportError as error:
        return _unavailable("cupy", error), None
    try:
        numbers = [int(number) for number in nvrtc.getSupportedArchs()]
        version = _probe_version(nvrtc, max(numbers))
    except Exception as error:  # cuda-pathfinder's errors are RuntimeErrors, a loader's OSErrors
        builtins = _MISSING_BUILTINS.search(str(error))
        return _unavailable(builtins[1] if builtins else "libnvrtc", error), None
    return {"version": version, "capabilities": numbers, "library": _library_path()}, nvrtc


def _unavailable(library: str, error: Exception) -> dict[str, Any]:
    if any(kind.__name__ == "DynamicLibNotFoundError" for kind in type(error).__mro__):
        # Its text lists every directory it looked into.
        return {"unavailable": library, "reason": "no package and no directory of the system has it"}
    words = " ".join(str(error).split())
    return {"unavailable": library, "reason": words[:200] or type(error).__name__}


def _probe_version(nvrtc: Any, capability: int) -> str:
    program = nvrtc.createProgram(_VERSION_PROBE, "probe.cu", (), ())
    try:
        try:
            nvrtc.compileProgram(program, (f"-arch=compute_{capability}",))
        except nvrtc.NVRTCError as error:
            raise RuntimeError(f"{error}: {_log_of(nvrtc, program)}") from None
        text = bytes(nvrtc.getPTX(program)).decode()
        found = {name: int(number) - 1 for name, number in _PROBED.findall(text)}
    finally:
        nvrtc.destroyProgram(program)
    return "{major}.{minor}.{build}".format(**found)


def _library_path() -> str:
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line.rstrip("\n").partition("/")[2]
            if path.rpartition("/")[2].startswith("libnvrtc.so"):
                return f"/{path}"
    return "libnvrtc"


def _answer(nvrtc: Any, source: str, options: tuple[str, ...]) -> tuple[dict[str, Any], bytes]:
    if nvrtc is None:
        return {"ok": False, "error": "no compiler", "memory": False, "log": ""}, b""
    started = time.perf_counter()
    try:
        program = nvrtc.createProgram(source, PROGRAM_NAME, (), ())
        try:
            nvrtc.compileProgram(program, options)
            log = _log_of(nvrtc, program)
            cubin = bytes(nvrtc.getCUBIN(program))
        except nvrtc.NVRTCError as error:
            log = _log_of(nvrtc, program)
            memory = _OUT_OF_MEMORY in str(error) or _FRONT_END_OUT_OF_MEMORY in log
            return {"ok": False, "error": str(error), "memory": memory, "log": log}, b""
        finally:
            nvrtc.destroyProgram(program)
    except MemoryError:
        return {"ok": False, "error": "MemoryError", "memory": True, "log": ""}, b""
    elapsed_ms = (time.perf_counter() - started) * 1000
    return {"ok": True, "log": log, "compile_ms": elapsed_ms}, cubin


def _log_of(nvrtc: Any, program: Any) -> str:
    try:
        log = nvrtc.getProgramLog(program)
    except nvrtc.NVRTCError:
        return ""
    # A log may quote the source in any encoding, and an error can come thousands of times. The first lines
    # say what is wrong, the last ones hold the resource figures.
    text = log.decode("utf-8", "replace") if isinstance(log, bytes) else str(log)
    return text if len(text) <= 65536 else f"{text[:32768]}\n[...]\n{text[-32768:]}"


if __name__ == "__main__":
    main(sys.argv[1:])
