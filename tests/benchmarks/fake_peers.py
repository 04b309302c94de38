"""SGLang's and FlashInfer's compiled functions, spelled with the reference."""

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import peer_flashinfer
import peer_sglang
import pytest
import torch
import workload
from torch import Tensor

from mlaprep.clients.reference import prepare_chain


@contextlib.contextmanager
def one_set_of_peers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stand-ins for what the peers' classes would load, for the block."""

    def fused(cache: Tensor, loc: Tensor, *rest: Any) -> None:
        k_nope, k_rope, q_nope, q_rope, out, *_ = rest
        prepare_chain(q_nope, q_rope, k_nope, k_rope, cache, loc, out=out)

    def scatter(cache: Tensor, loc: Tensor, nope: Tensor, rope: Tensor, warps: int, skipped: int) -> None:
        assert (cache.dtype, warps, skipped) == (torch.float8_e4m3fn, 0, -1)
        cache.view(torch.uint8)[loc] = torch.cat((nope.view(torch.uint8), rope.view(torch.uint8)), 1)

    def rope_quantize(q_rope: Tensor, k_rope: Tensor, q_nope: Tensor, k_nope: Tensor, *rest: Any) -> None:
        q_rope_out, k_rope_out, q_nope_out, k_nope_out, table, positions, *options = rest
        assert options == [1.0, 1.0, True, True]
        cache = torch.empty((len(positions), workload.ROW), dtype=torch.uint8)
        loc = torch.arange(len(positions))
        rotation = {"positions": positions, "cos_sin_cache": table, "rope": "interleaved"}
        query = prepare_chain(q_nope, q_rope, k_nope, k_rope, cache, loc, **rotation)
        rows = cache.view(torch.float8_e4m3fn)
        for target, source in ((q_rope_out, query[..., 512:]), (k_rope_out, rows[:, 512:])):
            target.copy_(source)
        for target, source in ((q_nope_out, query[..., :512]), (k_nope_out, rows[:, :512])):
            target.copy_(source)

    def append(*arguments: Any) -> None:
        q_rope, k_rope, q_nope, k_nope, values, q_rope_out, q_nope_out, table, pos_ids, *rest = arguments
        k_cache, v_cache, latent, rotary, indices, indptr, requests, positions, *options = rest
        assert options == [0, peer_flashinfer.PAGE, 1.0, 1.0, True, True]
        assert [tensor.numel() for tensor in (values, k_cache, v_cache)] == [0, 0, 0]
        rows = torch.empty((len(pos_ids), workload.ROW), dtype=torch.float8_e4m3fn)
        outs = (q_rope_out, rows[:, 512:], q_nope_out, rows[:, :512])
        rope_quantize(q_rope, k_rope[:, 0], q_nope, k_nope[:, 0], *outs, table, pos_ids, 1.0, 1.0, True, True)
        for token, row in enumerate(rows):
            flat = int(indptr[requests[token]]) * peer_flashinfer.PAGE + int(positions[token])
            page, entry = int(indices[flat // peer_flashinfer.PAGE]), flat % peer_flashinfer.PAGE
            latent[page, entry] = row[:512]
            rotary[page, entry] = row[512:]

    module = types.SimpleNamespace(rope_quantize=rope_quantize, rope_quantize_append_paged_kv_cache=append)
    with monkeypatch.context() as patch:
        patch.setattr(peer_sglang.Sglang, "kernel", lambda self, pdl: fused)
        patch.setattr(peer_sglang.Sglang, "warps", lambda self, items: 4)
        patch.setattr(peer_sglang.Sglang, "scatter", lambda self: scatter)
        patch.setattr(peer_flashinfer.Flashinfer, "_module", module)
        yield
