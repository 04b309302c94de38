"""Options that several commands share, and what they select."""

import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from mlaprep.clients.cli_output import VARIANT_PREFIX
from mlaprep.kernels_cache.disk import DiskStore
from mlaprep.kernels_cache.errors import StoreError
from mlaprep.kernels_cache.location import cache_dir, default_max_bytes
from mlaprep.kernels_cache.opening import open_default_store
from mlaprep.kernels_cache.store import KernelStore
from mlaprep.templates.arch import ARCHS, DEFAULT_ARCHS, Arch
from mlaprep.templates.errors import FieldProblem, SpecError
from mlaprep.templates.presets import Preset, preset
from mlaprep.templates.spec import KernelSpec, parse_variant_id

MAX_SPEC_BYTES: Final = 2**20
_SIZE: Final = re.compile(r"([0-9]{1,15})\s*([KMGT]?)(i?B)?", re.ASCII | re.IGNORECASE)
_ALL: Final = "all"
_UNITS: Final = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]
Presets = Annotated[
    list[str] | None, typer.Option("--preset", metavar="NAME", help="A model, e.g. kimi-k3. May be repeated.")
]
Tps = Annotated[
    list[str] | None,
    typer.Option(
        "--tp", metavar="N", help="Tensor-parallel degree of the presets, or all; all of them by default. Repeats."
    ),
]
Variants = Annotated[list[str] | None, typer.Option("--variant", metavar="ID", help="A variant id. May be repeated.")]
SpecFile = Annotated[
    str | None, typer.Option("--spec", metavar="FILE", help="JSON: one spec or a list of them; - reads stdin.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Override a field of the presets, e.g. pdl=false. Repeats."),
]
Archs = Annotated[
    list[str] | None,
    typer.Option(
        "--arch",
        metavar="ARCH",
        help=f"Target, e.g. sm_100a, or all. May be repeated. Default: {' '.join(map(str, DEFAULT_ARCHS))}.",
    ),
]
ArchFilter = Annotated[
    list[str] | None, typer.Option("--arch", metavar="ARCH", help="Only kernels for this target. May be repeated.")
]
CacheDir = Annotated[
    str | None,
    typer.Option(
        "--cache-dir",
        metavar="DIR",
        help="Kernel cache. Default: MLAPREP_CACHE_DIR, $XDG_CACHE_HOME/mlaprep or ~/.cache/mlaprep.",
    ),
]
Url = Annotated[str | None, typer.Option("--url", envvar="MLAPREP_URL", help="Kernel service, e.g. http://host:8400.")]
Token = Annotated[
    str | None,
    typer.Option(
        "--token",
        envvar="MLAPREP_TOKEN",
        show_default=False,
        help="Bearer token of the service. Prefer the environment variable: other users can read command lines.",
    ),
]


def select_specs(
    presets: Sequence[str] | None,
    tps: Sequence[str] | None,
    variants: Sequence[str] | None,
    spec_file: str | None,
    overrides: Sequence[str] | None,
) -> list[KernelSpec]:
    """The specs that a command line names, each once, in the order given.

    Raises:
        SpecError: none is named, or one that cannot be.
        OSError: a spec file that cannot be read.
    """
    fields = override_fields(overrides)
    specs = []
    for name in presets or ():
        model = preset(name)
        specs += [model.spec(tp, **fields) for tp in _degrees(tps, model)]
    specs += [parse_variant_id(full_variant_id(text)) for text in variants or ()]
    if spec_file is not None:
        document = _read_json(spec_file)
        specs += [KernelSpec.from_dict(item) for item in (document if isinstance(document, list) else [document])]
    if not specs:
        raise SpecError(FieldProblem("kernels", "nothing", "--preset NAME, --variant ID or --spec FILE"))
    return list(dict.fromkeys(specs))


def override_fields(overrides: Sequence[str] | None) -> dict[str, Any]:
    """Spec fields from texts such as ``pdl=false``. Raises SpecError for a text without ``=``."""
    return dict(_override(text) for text in overrides or ())


def select_archs(names: Sequence[str] | None) -> list[Arch]:
    """The architectures named, or the default ones. Raises SpecError for an unknown one.

    ``all`` stands for those that are made for one device each and run every kind of kernel; the others are
    built by name.
    """
    if not names:
        return list(DEFAULT_ARCHS)
    every = [arch for arch in ARCHS if arch.name.endswith("a")]
    return list(dict.fromkeys(arch for name in names for arch in (every if name == _ALL else [Arch(name)])))


def full_variant_id(text: str) -> str:
    """A variant id as tables show it on a narrow terminal, made whole."""
    return text if text.startswith(VARIANT_PREFIX) else VARIANT_PREFIX + text


def named_cache_dir(given: str | None) -> Path:
    """The cache directory that an option, the environment or the default names. Raises StoreError for none."""
    return cache_dir(given, os.environ)


def open_store(given: str | None) -> KernelStore:
    """The store in the cache directory, made where it is missing; one in memory where none was named.

    Raises:
        StoreError: a directory was named that cannot be used.
    """
    if not (given or os.environ.get("MLAPREP_CACHE_DIR")):
        return open_default_store()
    return _disk_store(named_cache_dir(given))


def existing_store(given: str | None) -> DiskStore | None:
    """The store in the cache directory, to be looked at; None where there is no such directory.

    Raises:
        StoreError: a directory that cannot be used.
    """
    place = named_cache_dir(given)
    try:
        os.stat(place)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"no kernel cache can be kept at {place}: {error.strerror}") from None
    return _disk_store(place)


def _disk_store(place: Path) -> DiskStore:
    limit = default_max_bytes(os.environ)
    return DiskStore(place) if limit is None else DiskStore(place, limit)


def parse_size(text: str) -> int:
    """Bytes from a number with an optional K, M, G or T (powers of 1,024). Raises SpecError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise SpecError(
            FieldProblem("max-bytes", "a string that is not a size", "bytes, or a number with K, M, G or T")
        )
    return int(match[1]) * _UNITS[match[2].upper()]


def _degrees(tps: Sequence[str] | None, model: Preset) -> list[int]:
    degrees: list[int] = []
    for text in tps or [_ALL]:
        if text == _ALL:
            degrees += model.tp_degrees
        elif text.isascii() and text.isdigit() and len(text) < 5:
            degrees.append(int(text))
        else:
            raise SpecError(FieldProblem("tp", "a string that is no number", "a degree of the model, or all"))
    return degrees


def _override(text: str) -> tuple[str, Any]:
    field, separator, value = text.partition("=")
    if not separator or not field:
        raise SpecError(FieldProblem("set", "a string without =", "FIELD=VALUE, e.g. pdl=false"))
    try:
        return field, json.loads(value)
    except (ValueError, RecursionError):
        return field, value


def _read_json(name: str) -> Any:
    if name == "-":
        text = sys.stdin.buffer.read(MAX_SPEC_BYTES + 1)
    else:
        with open(name, "rb") as file:
            text = file.read(MAX_SPEC_BYTES + 1)
    if len(text) > MAX_SPEC_BYTES:
        raise SpecError(FieldProblem("spec", f"more than {MAX_SPEC_BYTES} bytes", "a smaller document"))
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise SpecError(FieldProblem("spec", "text that is not JSON", "a JSON object of kernel spec fields")) from None
