"""Stand-ins for packages that sglang's backend imports and never uses in these runs, where they are not installed.

A machine with torch, triton and numpy alone can then import the backend. A package that is installed is always
taken; a name outside :data:`PACKAGES` stays missing.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import re
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

PACKAGES: Final = frozenset(
    {
        "aiohttp", "compressed_tensors", "cuda", "cutlass", "cv2", "deep_gemm", "dill", "einops", "fastapi",
        "flash_attn", "gguf", "httpx", "huggingface_hub", "IPython", "msgspec", "openai", "orjson", "outlines",
        "packaging", "partial_json_parser", "PIL", "psutil", "pybase64", "pydantic", "pydantic_core", "pynvml",
        "quack", "regex", "requests", "safetensors", "sentencepiece", "setproctitle", "sgl_kernel", "soundfile",
        "starlette", "tokenizers", "torchao", "torchaudio", "torchvision", "tqdm", "transformers", "triton_kernels",
        "tvm_ffi", "uvicorn", "uvloop", "xgrammar", "yaml", "zmq",
    }
)  # fmt: skip


class _Anything(type):
    """A class that has every attribute, is a decorator, and can be subscripted, called, compared and or-ed."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _anything(name)

    def __call__(cls, *args: Any, **options: Any) -> Any:
        if len(args) == 1 and not options and isinstance(args[0], types.FunctionType | type):
            return args[0]
        return super().__call__()

    def __getitem__(cls, _: Any) -> Any:
        return cls

    def __or__(cls, _: Any) -> Any:
        return cls

    __ror__ = __or__

    def __iter__(cls) -> Any:
        return iter(())

    def __lt__(cls, _: Any) -> bool:
        return False

    __gt__ = __le__ = __ge__ = __lt__

    def __setitem__(cls, _: Any, __: Any) -> None:
        pass

    def __contains__(cls, _: Any) -> bool:
        return False


def _anything(name: str) -> type:
    def call(self: Any, *args: Any, **options: Any) -> Any:
        return args[0] if len(args) == 1 and not options and isinstance(args[0], types.FunctionType | type) else self

    def attribute(self: Any, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return _anything(attribute)

    members = {"__call__": call, "__getattr__": attribute, "__init_subclass__": classmethod(lambda cls, **_: None)}
    return _Anything(name, (), members)


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        made: dict[str, Any] = {"__version__": "999.0.0", "dumps": lambda *_, **__: b""}
        value = made.get(name) or _anything(name)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: frozenset[str]) -> None:
        self.packages = packages

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package, _, inner = name.partition(".")
        # A part of an installed package is not ours to make up.
        if package not in self.packages or (inner and not isinstance(sys.modules.get(package), _Module)):
            return None
        used.add(package)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        if spec.name == "regex":  # patterns are made at import
            return re
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


used: Final[set[str]] = set()
"""Packages that a stand-in was taken for."""


def stand_in(site: Path | None = None) -> None:
    """Let packages that are not installed be imported from now on; ``site`` is the folder that holds sglang's package.

    Where all but torchvision are there, it alone is stood in for. sglang's own ``__init__``, which brings its front end
    and patches transformers, is left out where one is missing.
    """
    missing = {name for name in ("transformers", "torchvision", "openai") if importlib.util.find_spec(name) is None}
    if not missing:
        return
    spec = importlib.util.find_spec("sglang") if site is None else None
    folders = [str(site / "sglang")] if site else list((spec and spec.submodule_search_locations) or [])
    if missing == {"torchvision"}:
        sys.meta_path.append(_Finder(frozenset(missing)))
    else:
        sys.meta_path.insert(0, _Finder(_CHECKING))
        sys.meta_path.append(_Finder(PACKAGES))
    package = types.ModuleType("sglang")
    package.__path__ = folders
    sys.modules["sglang"] = package


_CHECKING: Final = frozenset({"openai", "pydantic", "pydantic_core", "starlette"})
"""They read the types of fields at import and refuse stand-ins, so they are stood in for as well where others are."""
