"""Product: what the compiler's answer is made into, once it has been checked."""

import hashlib
from collections.abc import Mapping
from typing import Any, Final

from mlaprep.kernels_cache.artifact import KernelArtifact, Manifest, utc_now
from mlaprep.kernels_cache.elf import check_cubin, complete_cubin
from mlaprep.kernels_cache.errors import ArtifactError
from mlaprep.kernels_cache.json_text import JsonText
from mlaprep.kernels_cache.key import cache_key
from mlaprep.service.errors import CompileFailed
from mlaprep.service.resources import parse_resources
from mlaprep.service.toolchain import Toolchain
from mlaprep.templates.arch import Arch
from mlaprep.templates.render import KernelSource

_MAX_LOG_SHOWN: Final = 4000


def make_artifact(
    toolchain: Toolchain,
    source: KernelSource,
    arch: Arch,
    options: tuple[str, ...],
    reply: Mapping[str, Any],
    raw: bytes,
) -> KernelArtifact:
    """The artifact of a compile that went well.

    Raises:
        CompileFailed: bytes that are no cubin for ``arch``, or a log without resource figures.
    """
    log = str(reply.get("log"))
    try:
        cubin = complete_cubin(raw)
        check_cubin(cubin, arch.name)
        usage = parse_resources(log, source.entry)
    except (ArtifactError, ValueError) as error:
        raise CompileFailed(f"NVRTC gave no usable kernel for {arch}: {error}", shown(log)) from None
    manifest = Manifest(
        variant_id=source.spec.variant_id,
        spec=JsonText(source.spec.to_dict()),
        arch=arch.name,
        key=cache_key(source=source.text, options=options, arch=arch.name, nvrtc_version=toolchain.version),
        cubin_sha256=hashlib.sha256(cubin).hexdigest(),
        cubin_size=len(cubin),
        source_sha256=source.sha256,
        entry=source.entry,
        launch=JsonText(source.launch),
        registers=usage.registers,
        spill_stores=usage.spill_stores,
        spill_loads=usage.spill_loads,
        stack_bytes=usage.stack_bytes,
        shared_bytes=usage.shared_bytes,
        nvrtc_version=toolchain.version,
        options=options,
        compile_ms=round(reply["compile_ms"], 3),
        created_at=utc_now(),
    )
    return KernelArtifact(manifest, cubin, source.text)


def check_source(text: str) -> None:
    """Refuse a text that the compiler would read otherwise than the key has it.

    Raises:
        CompileFailed: a NUL or a lone surrogate.
    """
    # NVRTC takes a C string: what follows a NUL would be in the key and not in the code.
    if "\0" in text:
        raise CompileFailed("the source holds a NUL character, where the compiler would stop reading")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise CompileFailed("the source holds a lone surrogate, which no UTF-8 text can") from None


def shown(log: object) -> str:
    """A log as far as an error carries it."""
    text = str(log).strip()
    return text if len(text) <= _MAX_LOG_SHOWN else f"{text[:_MAX_LOG_SHOWN]} [...]"
