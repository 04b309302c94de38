"""Real backend objects of sglang over real pools, with everything that needs an engine or a GPU around them stood in.

Stood in, always: the attention kernel (it records what it is handed, and attends to nothing) and the repair of rows
without keys behind it. Stood in by torch operations of the same arithmetic, where sglang's own cannot run: FlashInfer's
rotate-and-quantise and, on a GPU, the JIT-compiled concatenation. Rows are scattered by sglang's own writers: its torch
one on the CPU, its Triton kernel on a GPU.
"""

import contextlib
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from mlaprep.clients.rotation import Rotation

LAYERS = 3


@dataclass
class Sglang:
    """The modules of sglang that a run needs."""

    base: Any
    cutedsl: Any
    pools: Any
    modes: Any
    runtime: Any
    logits: Any
    environ: Any


def import_sglang(device: str) -> Sglang:
    """Import the backend and stand in for what cannot run here."""
    from importlib import import_module

    flashinfer = types.ModuleType("flashinfer")
    flashinfer.rope = types.ModuleType("flashinfer.rope")  # type: ignore[attr-defined]
    flashinfer.rope.mla_rope_quantize_fp8 = rotate_and_quantise  # type: ignore[attr-defined]
    found = Sglang(
        base=import_module("sglang.srt.layers.attention.trtllm_mla_backend"),
        cutedsl=import_module("sglang.srt.layers.attention.cutedsl_mla_backend"),
        pools=import_module("sglang.srt.mem_cache.memory_pool"),
        modes=import_module("sglang.srt.model_executor.forward_batch_info").ForwardMode,
        runtime=import_module("sglang.srt.runtime_context"),
        logits=import_module("sglang.srt.layers.logits_processor"),
        environ=import_module("sglang.srt.environ").envs,
    )
    sys.modules.setdefault("flashinfer", flashinfer)
    sys.modules["flashinfer.rope"] = flashinfer.rope  # type: ignore[attr-defined]
    sys.modules["flashinfer"].rope = flashinfer.rope  # type: ignore[attr-defined]
    for module in (found.base, found.cutedsl):
        module.fixup_zero_kv_rows = lambda *_: None
    if device == "cuda":
        utils = import_module("sglang.kernels.ops.attention.utils")
        utils.concat_mla_absorb_q = lambda nope, rope: torch.cat([nope, rope], dim=-1)
        # Where tvm-ffi is a stand-in, a kernel it "compiled" would do nothing; sglang has the same scatter in Triton.
        scatter = import_module("sglang.kernels.ops.kvcache.set_mla_kv_buffer")
        scatter.can_use_set_mla_kv_buffer = lambda *_: False
    return found


def rotate_and_quantise(
    *, q_rope: Any, k_rope: Any, q_nope: Any, k_nope: Any, cos_sin_cache: Any, pos_ids: Any, is_neox: bool,
    q_rope_out: Any, k_rope_out: Any, q_nope_out: Any, k_nope_out: Any, **_: Any,
) -> None:  # fmt: skip
    """FlashInfer's rotate-and-quantise with scales of 1: rotate in fp32, then round once."""
    turns = Rotation.at("neox" if is_neox else "interleaved", pos_ids, cos_sin_cache)
    for source, target, turn in (
        (q_rope, q_rope_out, True), (k_rope, k_rope_out, True),
        (q_nope, q_nope_out, False), (k_nope, k_nope_out, False),
    ):  # fmt: skip
        values = source.float()
        target.copy_((turns.turn(values) if turn else values).to(target.dtype))


@dataclass
class Recorded:
    """What the attention kernel was handed."""

    query: list[torch.Tensor] = field(default_factory=list)
    cache: list[torch.Tensor] = field(default_factory=list)


def make_backend(
    sglang: Sglang, kind: type, pool: Any, heads: int, rank: int, rope_dim: int, data_type: torch.dtype, device: str
) -> tuple[Any, Recorded]:
    """An object of a backend class, its attributes as its own constructor sets them where a call reads them."""
    recorded = Recorded()

    def attend(query: torch.Tensor, kv_cache: torch.Tensor, **options: Any) -> Any:
        recorded.query.append(query.clone())
        recorded.cache.append(kv_cache.clone())
        out = torch.zeros((*query.shape[:-1], rank), dtype=torch.bfloat16, device=query.device)
        return (out, out.new_zeros(query.shape[:-1], dtype=torch.float32)) if options.get("return_lse") else out

    backend = kind.__new__(kind)
    vars(backend).update(
        num_q_heads=heads, kv_lora_rank=rank, qk_rope_head_dim=rope_dim, kv_cache_dim=rank + rope_dim, page_size=4,
        data_type=data_type, q_data_type=torch.bfloat16, token_to_kv_pool=pool, device=device, num_draft_tokens=2,
        forward_prefill_metadata=None, forward_decode_metadata=None, padded_q_buffer=None, unpad_output_buffer=None,
        kv_index_translator=types.SimpleNamespace(is_translating=False),
        q_indptr_decode=torch.arange(64, dtype=torch.int32),
        dense_q_indptr_verify=torch.arange(64, dtype=torch.int32) * 2,
        _fused_set_kv_concat_q=False, _fused_set_kv_concat_q_fp8=False, _run_decode_kernel=attend,
    )  # fmt: skip
    return backend, recorded


def make_pool(sglang: Sglang, kind: str, rank: int, rope_dim: int, data_type: torch.dtype, device: str) -> Any:
    """A real pool of 64 slots: ``plain``, ``hybrid`` (layer 7 is its layer 1), or ``own-writer``."""
    base = sglang.pools.MLATokenToKVPool
    if kind == "own-writer":

        class OwnWriter(base):  # type: ignore[misc, valid-type]
            def set_mla_kv_buffer(self, *args: Any, **named: Any) -> None:
                super().set_mla_kv_buffer(*args, **named)

        base = OwnWriter
    pool = base(
        size=60, page_size=4, dtype=data_type, kv_lora_rank=rank, qk_rope_head_dim=rope_dim, layer_num=LAYERS,
        device=device, enable_memory_saver=False,
    )  # fmt: skip
    for rows in pool.kv_buffer:
        rows.view(torch.uint8).fill_(0x5A)
    if kind != "hybrid":
        return pool
    hybrid = sglang.pools.HybridLinearKVPool.__new__(sglang.pools.HybridLinearKVPool)
    vars(hybrid).update(
        full_kv_pool=pool,
        layer_transfer_counter=None,
        full_attention_layer_id_mapping={7: 1},
        start_layer=0,
        use_mla=True,
    )
    return hybrid


def rows_of(pool: Any) -> torch.Tensor:
    """Every byte of a pool."""
    return torch.stack([rows.view(torch.uint8) for rows in getattr(pool, "full_kv_pool", pool).kv_buffer]).clone()


@contextlib.contextmanager
def parallel(sglang: Sglang, world: int, rank: int) -> Iterator[None]:
    """sglang's decode context parallelism as rank ``rank`` of ``world``, in this one process."""
    context = sglang.runtime.get_parallel()
    # Past its own ``override``, which knows no field where the package that declares them is a stand-in.
    before = context._overrides
    context._overrides = before | {
        "dcp_enabled": world > 1, "dcp_size": world, "dcp_rank": rank, "attn_dcp_size": world, "attn_dcp_rank": rank
    }  # fmt: skip
    try:
        yield
    finally:
        context._overrides = before
