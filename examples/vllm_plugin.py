"""mlaprep under vLLM: its two MLA operations replaced, as a plugin.

vLLM calls `register` in each of its processes, before it makes a model, where a package names it:

    [project.entry-points."vllm.general_plugins"]
    mlaprep = "vllm_plugin:register"

Run by itself the file needs no vLLM: it plugs into stand-ins, takes a decode step and compares the bytes.

    python examples/vllm_plugin.py
"""

from types import SimpleNamespace
from typing import Any

import torch

from mlaprep.clients import prepare
from mlaprep.clients import vllm as mla

HEADS, RANK, ROPE = 16, 512, 64  # deepseek-v3 at TP 8
BLOCKS, BLOCK = 32, 64


def register() -> None:
    import vllm._custom_ops as ops
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    plug_in(ops, MLAAttention)


def plug_in(ops: Any, attention: Any) -> None:
    """Replace the cache write for all layers, and the query operation of each layer once its weights are loaded."""
    ops.concat_and_cache_mla = mla.concat_and_cache_mla
    load = attention.process_weights_after_loading

    def process_weights_after_loading(layer: Any, *arguments: Any, **options: Any) -> None:
        load(layer, *arguments, **options)
        del layer._decode_concat_quant_fp8_op  # a torch.nn.Module, which a function cannot replace
        layer._decode_concat_quant_fp8_op = mla.decode_concat_quant_fp8
        # Captured graphs then read the inverses instead of computing them.
        mla.fix_scale(layer._q_scale)
        mla.fix_scale(layer._k_scale)

    attention.process_weights_after_loading = process_weights_after_loading


class StandIn(torch.nn.Module):
    """What the plugin touches of vLLM's attention layer."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._q_scale = torch.tensor(0.5, device=device)
        self._k_scale = torch.tensor(2.0, device=device)
        self._decode_concat_quant_fp8_op = torch.nn.Identity()

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        pass


def main(tokens: int = 8) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ops = SimpleNamespace()
    plug_in(ops, StandIn)
    layer = StandIn(device)
    layer.process_weights_after_loading(torch.bfloat16)

    q_nope = torch.randn(HEADS, tokens, RANK, dtype=torch.bfloat16, device=device).transpose(0, 1)  # as bmm leaves it
    q_pe = torch.randn(tokens, HEADS, ROPE, dtype=torch.bfloat16, device=device)
    kv_c = torch.randn(tokens, RANK, dtype=torch.bfloat16, device=device)
    k_pe = torch.randn(tokens, ROPE, dtype=torch.bfloat16, device=device)
    slots = torch.arange(tokens, device=device)
    slots[-1] = -1  # a token that pads the batch
    kv_cache, other = (torch.zeros(BLOCKS, BLOCK, RANK + ROPE, dtype=torch.uint8, device=device) for _ in range(2))

    ops.concat_and_cache_mla(kv_c, k_pe, kv_cache, slots, kv_cache_dtype="fp8", scale=layer._k_scale)
    query = layer._decode_concat_quant_fp8_op(q_nope, q_pe, layer._q_scale)
    both = mla.concat_cache_and_quant_mla(q_nope, q_pe, kv_c, k_pe, other, slots, "fp8", layer._q_scale, layer._k_scale)
    assert torch.equal(query.view(torch.uint8), both.view(torch.uint8))
    assert torch.equal(kv_cache, other)
    inverses = {"q_scale_inv": 1 / layer._q_scale, "kv_scale_inv": 1 / layer._k_scale}
    plain = prepare(q_nope, q_pe, kv_c, k_pe, torch.zeros_like(other), slots, **inverses)
    assert torch.equal(query.view(torch.uint8), plain.view(torch.uint8))
    print(f"{tokens} tokens on {device}: two operations and one, the same bytes")


if __name__ == "__main__":
    main()
