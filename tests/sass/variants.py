"""The kernels whose machine code is looked at: one of every kind, and every preset at every degree."""

from mlaprep.templates.arch import DEFAULT_ARCHS, Arch
from mlaprep.templates.presets import PRESETS
from mlaprep.templates.render import check_target
from mlaprep.templates.spec import KernelSpec

ARCHS = (*DEFAULT_ARCHS, Arch("sm_121a"))

KINDS: dict[str, dict[str, object]] = {
    "plain": {},
    "fp16": {"dtype": "fp16"},
    "one-head": {"num_heads": 1, "loc_dtype": "i32"},
    "all-heads": {"num_heads": 256, "kv_lora_rank": 1024},
    "no-rope-columns": {"rope_dim": 0},
    "scales": {"q_scale": "scalar", "kv_scale": "scalar"},
    "token-scale": {"q_scale": "token", "dtype": "fp16"},
    "everything": {
        "rope": "neox",
        "q_scale": "token",
        "kv_scale": "scalar",
        "dcp_world": 4,
        "dcp_interleave": 16,
        "reserved_slot": True,
        "pad_heads_to": 64,
        "page_size": 64,
        "position_dtype": "i32",
    },
    "without-pdl": {"pdl": False, "rope": "interleaved"},
    "query-only": {"write_kv": False, "rope": "interleaved"},
    "cache-only": {"write_q": False, "rope": "interleaved", "kv_scale": "scalar"},
    "cache-only-ranks": {"write_q": False, "dcp_world": 8, "page_size": 16, "dcp_interleave": 16},
    "constant-strides": {"q_nope_token_stride": 512, "q_nope_head_stride": 8192, "cache_row_stride": 576},
    "interleaved": {"rope": "interleaved"},
    "interleaved-fp16": {"rope": "interleaved", "dtype": "fp16", "loc_dtype": "i32", "position_dtype": "i32"},
    "interleaved-128": {"rope": "interleaved", "rope_dim": 128, "pad_heads_to": 32},
    "neox": {"rope": "neox"},
    "neox-32": {"rope": "neox", "kv_lora_rank": 256, "rope_dim": 32},
    "neox-halves-meet": {"rope": "neox", "rope_dim": 16},
    "q16": {"layout": "fp8-q16"},
    "q16-interleaved": {"layout": "fp8-q16", "rope": "interleaved", "dtype": "fp16", "q_scale": "token"},
    "same": {"layout": "same"},
    "same-ranks": {"layout": "same", "dcp_world": 2, "rope": "interleaved", "q_scale": "scalar"},
    "same-neox": {"layout": "same", "rope": "neox", "dtype": "fp16", "page_size": 64, "pad_heads_to": 32},
    "ds_mla-raw": {"layout": "ds_mla", "rope": "interleaved"},
    "ds_mla-pow2": {"layout": "ds_mla", "tile_scale": "pow2", "rope": "interleaved", "page_size": 64},
    "ds_mla-input": {"layout": "ds_mla", "query_dtype": "input", "tile_scale": "pow2", "pad_heads_to": 64},
    "ds_mla-neox": {"layout": "ds_mla", "rope": "neox", "dtype": "fp16", "q_scale": "token"},
    "ds_mla-narrow-rows": {"layout": "ds_mla", "kv_lora_rank": 128},
    "ds_mla-cache-only": {"layout": "ds_mla", "write_q": False, "elements_per_thread": 8},
    "8-elements": {"elements_per_thread": 8},
    "8-elements-interleaved": {"elements_per_thread": 8, "rope": "interleaved"},
    "8-elements-neox": {"elements_per_thread": 8, "rope": "neox", "layout": "same"},
    "4-elements": {"elements_per_thread": 4, "rope": "interleaved"},
    "4-elements-ds_mla": {"elements_per_thread": 4, "layout": "ds_mla", "tile_scale": "pow2"},
    "2-elements": {"elements_per_thread": 2, "rope": "neox"},
    "2-elements-same": {"elements_per_thread": 2, "layout": "same", "rope": "interleaved"},
    "32-byte-loads": {"load_bytes": 32},
    "32-byte-loads-interleaved": {"load_bytes": 32, "rope": "interleaved"},
    "32-byte-loads-neox": {"load_bytes": 32, "rope": "neox", "layout": "same"},
    "32-byte-loads-ds_mla": {"load_bytes": 32, "layout": "ds_mla"},
}
"""Fields beside 16 heads, by name."""


def kind(name: str) -> KernelSpec:
    """The spec of a kind."""
    return KernelSpec.from_dict({"num_heads": 16} | KINDS[name])


def targets(spec: KernelSpec) -> list[Arch]:
    """The architectures that can run it."""
    return [arch for arch in ARCHS if _runs(spec, arch)]


def preset_specs() -> dict[KernelSpec, str]:
    """Every spec of every preset, once, and the first preset and degree that has it."""
    specs: dict[KernelSpec, str] = {}
    for name, preset in PRESETS.items():
        for tp in preset.tp_degrees:
            specs.setdefault(preset.spec(tp), f"{name} at {tp}")
    return specs


def _runs(spec: KernelSpec, arch: Arch) -> bool:
    try:
        check_target(spec, arch)
    except ValueError:
        return False
    return True
