"""render: KernelSpec -> KernelSource.

Only integers, booleans and words of the spec's own vocabulary reach a template, and an undefined name
is an error, so no caller's text is ever part of a source.
"""

import contextlib
import functools
import hashlib
import os
import traceback
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Final

import jinja2

from mlaprep.templates import compiled
from mlaprep.templates.arch import Arch
from mlaprep.templates.errors import FieldProblem, SpecError, TemplateError
from mlaprep.templates.fields import DYNAMIC, STRIDE_FIELDS, TILE
from mlaprep.templates.signature import kernel_parameters
from mlaprep.templates.spec import FIELDS, KernelSpec

ENTRY: Final = "mla_prepare"
"""Name of the kernel in every source and cubin."""

MAX_THREADS_PER_BLOCK: Final = 576
_ROOT_TEMPLATE: Final = "mla_prepare.cu.j2"
_LINE: Final = 96


@dataclass(frozen=True)
class KernelSource:
    """CUDA C++ for one spec. It includes nothing, so every compiler version builds the same text."""

    spec: KernelSpec
    text: str

    @property
    def entry(self) -> str:
        return ENTRY

    @functools.cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    @functools.cached_property
    def launch(self) -> dict[str, Any]:
        """What a launcher must know, as JSON values: the manifest carries it to the worker.

        ``threads_per_row`` is the block's x extent, ``rows_per_token`` the query heads written plus one
        for the cache row, ``parameters`` the kernel's arguments as ``[name, type]`` in order.
        """
        return {
            "elements_per_thread": self.spec.elements_per_thread,
            "threads_per_row": _threads_per_row(self.spec),
            "rows_per_token": _rows_per_token(self.spec),
            "max_threads_per_block": MAX_THREADS_PER_BLOCK,
            "pdl": self.spec.pdl,
            "parameters": [[parameter.name, parameter.type] for parameter in kernel_parameters(self.spec)],
        }


@functools.lru_cache(maxsize=4096)
def render(spec: KernelSpec) -> KernelSource:
    """The source of a spec: the same text for the same spec, in every process.

    Raises:
        TemplateError: a template has a mistake; its name and line are given.
    """
    context = _context(spec)
    environment = _compiled_environment()
    if environment is not None:
        with contextlib.suppress(Exception):  # told below, where a template's own name and line are known
            return KernelSource(spec, environment.get_template(_ROOT_TEMPLATE).render(context))
    try:
        text = _environment().get_template(_ROOT_TEMPLATE).render(context)
    except Exception as error:  # nothing but the templates is evaluated here, so the mistake is theirs
        raise _template_error(error) from error
    return KernelSource(spec, text)


def check_target(spec: KernelSpec, arch: Arch) -> None:
    """Refuse a spec that an architecture cannot run.

    Raises:
        SpecError: programmatic dependent launch, or 32-byte loads, on an architecture that has none.
    """
    if spec.pdl and not arch.supports_pdl:
        raise SpecError(FieldProblem("pdl", f"true for {arch}, which has none", "false, or sm_90 and up"))
    if spec.load_bytes == 32 and arch.capability < (10, 0):
        raise SpecError(FieldProblem("load_bytes", f"32 for {arch}, which loads 16 at most", "16, or sm_100 and up"))


@functools.cache
def templates_fingerprint() -> str:
    """sha256 over every template file and the jinja2 version.

    The head comment of each source carries it, so a changed template is a new source even where the
    change does not show in that variant.
    """
    digest = hashlib.sha256(f"jinja2 {jinja2.__version__}\n".encode())
    for name, text in sorted(_template_files().items()):
        data = text.encode()
        digest.update(f"{name} {len(data)}\n".encode() + data)
    return digest.hexdigest()


@functools.cache
def _template_files() -> Mapping[str, str]:
    """Every template's text by its file name."""
    folder = os.path.dirname(__file__)
    texts = {}
    for name in os.listdir(folder):
        if name.endswith(".j2"):
            with open(os.path.join(folder, name), "rb", buffering=0) as file:
                texts[name] = file.readall().decode()
    return texts


def read_templates() -> None:
    """Do what every rendering needs and only the first one of a process does: half a millisecond."""
    environment = _compiled_environment()
    if environment is not None:
        for name in compiled.TEMPLATES:
            environment.get_template(name)


def new_environment(loader: jinja2.BaseLoader) -> jinja2.Environment:
    """What the templates are written for, with templates from ``loader``."""
    return jinja2.Environment(
        loader=loader,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


@functools.cache
def _environment() -> jinja2.Environment:
    return new_environment(jinja2.FunctionLoader(_load))


def _load(name: str) -> tuple[str, str, None] | None:
    # With a file name of its own each template shows in a traceback, with its line.
    text = _template_files().get(name)
    return None if text is None else (text, name, None)


def _compiled_environment() -> jinja2.Environment | None:
    """Templates that are Python already; None where they were made from others, or by another jinja2."""
    return _environment_of_compiled() if templates_fingerprint() == compiled.FINGERPRINT else None


@functools.cache
def _environment_of_compiled() -> jinja2.Environment:
    return new_environment(_CompiledLoader())


class _CompiledLoader(jinja2.BaseLoader):
    def load(
        self, environment: jinja2.Environment, name: str, globals: MutableMapping[str, Any] | None = None
    ) -> jinja2.Template:
        return jinja2.Template.from_module_dict(
            environment, compiled.TEMPLATES[name](environment), environment.make_globals(globals)
        )


def _template_error(error: Exception) -> TemplateError:
    if isinstance(error, jinja2.TemplateSyntaxError):
        return TemplateError(error.name or _ROOT_TEMPLATE, error.lineno, error.message or "a syntax error")
    places = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in _template_files()]
    name, line = (places[-1].filename, places[-1].lineno or 0) if places else (_ROOT_TEMPLATE, 0)
    told = error.message if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
    return TemplateError(name, line, told or type(error).__name__)


def _rows_per_token(spec: KernelSpec) -> int:
    return (spec.pad_heads_to if spec.write_q else 0) + (1 if spec.write_kv else 0)


def _threads_per_row(spec: KernelSpec) -> int:
    threads = spec.row_width // spec.elements_per_thread
    if spec.layout != "ds_mla" or not spec.write_kv:
        return threads
    # A whole number of tiles, so that the threads of one tile never straddle two warps.
    per_tile = TILE // spec.elements_per_thread
    return -(-threads // per_tile) * per_tile


def _element_store_words(spec: KernelSpec) -> int:
    """Words of one store of 2-byte results: what both the thread's share and every address allow; 0 if none."""
    query = spec.write_q and not spec.quantised_query
    cache = spec.write_kv and spec.layout in ("same", "ds_mla")
    if not (query or cache):
        return 0
    words = min(spec.elements_per_thread // 2, 4)
    if spec.write_kv and spec.layout == "ds_mla":
        # Rotary columns stand behind the tile scales, in rows that start at a multiple of the code store.
        offset = spec.kv_lora_rank + 4 * (spec.kv_lora_rank // TILE)
        words = min(words, spec.elements_per_thread // 4, (offset & -offset) // 4)
    return max(words, 1)


def _context(spec: KernelSpec) -> dict[str, Any]:
    c_types = {"i64": "long long", "u32": "unsigned"}
    pointers = {
        "q_out": "unsigned char*",
        "kv_cache": "unsigned char*",
        "loc": "const int*" if spec.loc_dtype == "i32" else "const long long*",
        "q_scale_inv": "const float*",
        "kv_scale_inv": "const float*",
        "positions": "const int*" if spec.position_dtype == "i32" else "const long long*",
        "cos_sin_cache": "const float*",
    }
    parameters = [
        (pointers.get(p.name, "const Element*") if p.type == "pointer" else c_types[p.type], p.name)
        for p in kernel_parameters(spec)
    ]
    return {
        "spec": spec,
        "shown": _shown(spec),
        "fingerprint": templates_fingerprint(),
        "jinja2_version": jinja2.__version__,
        "parameters": parameters,
        "constant_strides": {
            field: getattr(spec, field)
            for field in STRIDE_FIELDS
            if getattr(spec, field) != DYNAMIC and not spec.stride_is_moot(field)
        },
        "max_threads": MAX_THREADS_PER_BLOCK,
        "rows_per_token": _rows_per_token(spec),
        "element_store_words": _element_store_words(spec),
        "tile": TILE,
    }


def _shown(spec: KernelSpec) -> list[str]:
    """Every field with its value, in lines of a comment."""
    lines, line = [], ""
    for name in FIELDS:
        item = f"{name} {_spell(getattr(spec, name))}"
        if line and len(line) + len(item) + 2 > _LINE:
            lines.append(line + ",")
            line = item
        else:
            line = f"{line}, {item}" if line else item
    return [*lines, line]


def _spell(value: object) -> str:
    return str(value).lower()
