"""Presets: the shapes of public MLA models, as specs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from mlaprep.templates.errors import FieldProblem, SpecError
from mlaprep.templates.fields import Layout, Rope
from mlaprep.templates.spec import KernelSpec


@dataclass(frozen=True, slots=True)
class Preset:
    """What a model's public configuration says of its MLA layers."""

    name: str
    num_heads: int
    """Query heads of the whole model, before tensor parallelism."""
    kv_lora_rank: int
    rope_dim: int
    rope: Rope
    """How the model rotates its rotary columns."""
    layout: Layout
    """How the model's engines keep its cache."""
    tp_degrees: tuple[int, ...]
    """Tensor-parallel degrees the model is served at; each divides ``num_heads``."""

    def spec(self, tp: int = 1, **fields: Any) -> KernelSpec:
        """The spec of one rank at tensor-parallel degree ``tp``; ``fields`` override.

        Raises:
            SpecError: a degree the model is not served at, or a field the spec refuses.
        """
        if type(tp) is not int or tp not in self.tp_degrees:
            degrees = ", ".join(map(str, self.tp_degrees))
            raise SpecError(FieldProblem("tp", f"a degree {self.name} is not served at", f"one of {degrees}"))
        model = {
            "num_heads": self.num_heads // tp,
            "kv_lora_rank": self.kv_lora_rank,
            "rope_dim": self.rope_dim,
            "layout": self.layout,
            "rope": self.rope,
        }
        return KernelSpec.from_dict(model | fields)


_TP_16: Final = (1, 2, 4, 8, 16)

PRESETS: Final[Mapping[str, Preset]] = {
    preset.name: preset
    for preset in (
        Preset("deepseek-v2", 128, 512, 64, "interleaved", "fp8", _TP_16),
        Preset("deepseek-v3", 128, 512, 64, "interleaved", "fp8", _TP_16),
        Preset("deepseek-r1", 128, 512, 64, "interleaved", "fp8", _TP_16),
        Preset("deepseek-v3.2", 128, 512, 64, "interleaved", "ds_mla", _TP_16),
        Preset("deepseek-v2-lite", 16, 512, 64, "interleaved", "fp8", _TP_16),
        Preset("kimi-k2", 64, 512, 64, "interleaved", "fp8", _TP_16),
        Preset("kimi-k2.5", 64, 512, 64, "interleaved", "fp8", _TP_16),
        Preset("kimi-k3", 96, 512, 64, "none", "fp8", _TP_16),
        Preset("kimi-linear-48b", 32, 512, 64, "none", "fp8", _TP_16),
        Preset("glm-5", 64, 512, 64, "interleaved", "fp8", _TP_16),
        Preset("glm-5.3-flash", 64, 512, 0, "none", "fp8", _TP_16),
        Preset("glm-4.7-flash", 20, 512, 64, "interleaved", "fp8", (1, 2, 4)),
        Preset("longcat-flash", 64, 512, 64, "interleaved", "fp8", _TP_16),
        Preset("minicpm3-4b", 40, 256, 32, "neox", "fp8", (1, 2, 4, 8)),
        Preset("mistral-small-4", 32, 256, 64, "interleaved", "fp8", _TP_16),
    )
}
"""Every known model by name, read from public model configurations."""


def preset(name: str) -> Preset:
    """The preset of that name.

    Raises:
        SpecError: no such preset; the nearest names are given.
    """
    if name in PRESETS:
        return PRESETS[name]
    import difflib

    near = difflib.get_close_matches(name[:64], PRESETS, n=3)
    raise SpecError(FieldProblem("preset", "a name that is not a preset", "one of " + ", ".join(near or PRESETS)))
