"""Drive sglang's real backends with stub batches, unpatched and patched, and compare every byte.

    python tests/sglang_backend/drive.py                  # CPU, through the unfused chain
    python tests/sglang_backend/drive.py --device cuda    # through the kernel

``--site`` names a folder with the package ``sglang`` in it, where it is not installed. Compared: the query and the
cache that the attention kernel is handed, the whole pool, the result, and the error where there is one.
"""

import argparse
import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import absent


@dataclass(frozen=True)
class Case:
    """One call. ``path`` is what is to become of it under the hook; by default the fused path."""

    kind: str = "decode"
    backend: str = "base"
    cache: str = "fp8"
    rope: str = "none"
    rank: int = 512
    rope_dim: int = 64
    save: bool = True
    loc: str = "i64"
    world: int = 1
    shard: int = 0
    pool: str = "plain"
    layout: str = "packed"
    llama: bool = False
    dtype: str = "bf16"
    async_assert: bool = False
    dummy_run: bool = False
    path: str = "fused"

    def __str__(self) -> str:
        plain = Case()
        words = [f"{k}={v}" for k, v in vars(self).items() if k == "kind" or (k != "path" and v != getattr(plain, k))]
        return " ".join(words)


def cases() -> list[Case]:
    every = [
        Case(kind=kind, cache=cache, rope=rope, rank=rank, rope_dim=rope_dim)
        for kind in ("decode", "verify")
        for cache in ("fp8", "bf16")
        for rope in ("none", "interleaved", "neox")
        for rank, rope_dim in ((512, 64), (256, 64), (320, 32))
    ]
    for kind in ("decode", "verify"):
        for cache in ("fp8", "bf16"):
            every += [
                Case(kind=kind, cache=cache, save=False),
                Case(kind=kind, cache=cache, save=False, loc="none"),
                Case(kind=kind, cache=cache, loc="none", path="no-loc"),
                Case(kind=kind, cache=cache, loc="i32"),
                Case(kind=kind, cache=cache, loc="padded"),
                Case(kind=kind, cache=cache, pool="hybrid"),
                Case(kind=kind, cache=cache, pool="own-writer", path="pool"),
                Case(kind=kind, cache=cache, layout="transposed"),
                Case(kind=kind, cache=cache, layout="sliced"),
                Case(kind=kind, cache=cache, llama=True),
                Case(kind=kind, cache=cache, dtype="fp32", path="arguments" if cache == "fp8" else "cache-dtype"),
                Case(kind=kind, cache=cache, layout="stepped", path="uncovered-on-gpu"),
                Case(kind=kind, cache=cache, async_assert=True, path="async-assert"),
            ]
            every += [Case(kind=kind, cache=cache, world=4, shard=shard) for shard in range(4)]
            every += [Case(kind=kind, cache=cache, world=4, dummy_run=True, path="own")]
            every += [
                Case(kind=kind, cache=cache, world=2, shard=1, backend="cutedsl", rope=r) for r in ("none", "neox")
            ]
            every += [Case(kind=kind, cache=cache, backend=name) for name in ("cutedsl", "prefill")]
        every += [Case(kind=kind, save=False, rope="interleaved"), Case(kind=kind, rank=512, rope_dim=0)]
        every += [Case(kind=kind, rope="neox", world=4, shard=2), Case(kind=kind, rope="neox", llama=True)]
    every += [Case(kind="draft", cache=cache, loc=loc) for cache in ("fp8", "bf16") for loc in ("i64", "padded")]
    every += [
        Case(kind="draft", llama=True, path="draft-fp8-options"),
        Case(kind="draft", rope="neox", path="draft-fp8-options"),
        Case(kind="draft", cache="bf16", llama=True),
    ]
    return every


TOKENS, HEADS, LAYER = 6, 4, 1


@dataclass
class Prepared:
    """One call on fresh objects, not made yet."""

    call: Callable[[], Any]
    inputs: list[torch.Tensor]
    """Its query and key tensors; ``k`` and ``k_rope`` are parts of the last."""
    slots: torch.Tensor
    pool: Any
    recorded: Any


def prepared(sglang: Any, case: Case, device: str) -> Prepared:
    import backends

    generator = torch.Generator().manual_seed(7)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[case.dtype]

    def values(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 3).to(dtype).to(device)

    def query(width: int) -> torch.Tensor:
        if case.layout == "transposed":
            return values(HEADS, TOKENS, width).transpose(0, 1)
        if case.layout == "sliced":
            return values(TOKENS, HEADS, width + 64)[..., :width]
        if case.layout == "stepped":
            return values(TOKENS, HEADS, width, 2)[..., 0]
        return values(TOKENS, HEADS, width)

    data_type = torch.float8_e4m3fn if case.cache == "fp8" else torch.bfloat16
    pool = backends.make_pool(sglang, case.pool, case.rank, case.rope_dim, data_type, device)
    kind = {
        "base": sglang.base.TRTLLMMLABackend,
        "cutedsl": sglang.cutedsl.CuteDslMLABackend,
        "prefill": sglang.cutedsl.CuteDslMLAPrefillBackend,
    }[case.backend]
    backend, recorded = backends.make_backend(sglang, kind, pool, HEADS, case.rank, case.rope_dim, data_type, device)
    slots = [5, 17, 2, 40, 33, 9] if case.world == 1 else [4, 5, 6, 7, 33, 130]
    if case.loc == "padded":
        slots = [5, 17, 0, 40, 0, 0]
    loc = torch.tensor(slots, dtype=torch.int32 if case.loc == "i32" else torch.int64, device=device)
    mode = {
        "decode": sglang.modes.DECODE,
        "verify": sglang.modes.TARGET_VERIFY,
        "draft": sglang.modes.DRAFT_EXTEND_V2,
    }[case.kind]
    lens = torch.full((TOKENS,), 3, dtype=torch.int32, device=device)
    batch_size = TOKENS if case.kind == "decode" else TOKENS // 2
    metadata = sglang.base.TRTLLMMLADecodeMetadata(
        block_kv_indices=lens[:, None],
        max_seq_len_k=16,
        seq_lens_k=lens[:batch_size],
        global_seq_lens_k=lens[:batch_size],
    )
    batch = SimpleNamespace(
        forward_mode=mode, out_cache_loc=None if case.loc == "none" else loc, out_cache_loc_is_physical=True,
        positions=torch.arange(TOKENS, device=device) * 3, batch_size=batch_size, seq_lens=lens[:batch_size],
        spec_info=SimpleNamespace(draft_token_num=2, ragged_verify_layout=None), decode_trtllm_mla_metadata=metadata,
    )  # fmt: skip
    layer = SimpleNamespace(
        tp_q_head_num=HEADS, tp_k_head_num=1, head_dim=case.rank + case.rope_dim, v_head_dim=case.rank, scaling=1.0,
        layer_id=7 if case.pool == "hybrid" else LAYER,
    )  # fmt: skip
    angles = torch.randn(32, max(case.rope_dim, 2) // 2, generator=generator)
    extra: dict[str, Any] = {}
    if case.rope != "none":
        extra = {"cos_sin_cache": torch.cat([angles.cos(), angles.sin()], 1).to(device), "is_neox": case.rope == "neox"}
    if case.llama:
        extra["llama_4_scaling"] = values(TOKENS, 1, 1)
    q, q_rope = query(case.rank), query(case.rope_dim)
    joined = values(TOKENS, 1, case.rank + case.rope_dim + 64)
    k, k_rope = joined[..., : case.rank], joined[..., case.rank : case.rank + case.rope_dim]
    forward = backend.forward_decode if case.kind == "decode" else backend.forward_extend

    def call() -> Any:
        return forward(q, k, k, layer, batch, save_kv_cache=case.save, q_rope=q_rope, k_rope=k_rope, **extra)

    return Prepared(call, [q, q_rope, joined], loc, pool, recorded)


def run(sglang: Any, case: Case, device: str) -> dict[str, Any]:
    """One call; what the attention kernel and the pool saw, and what came back."""
    import backends

    one = prepared(sglang, case, device)
    error, result = None, None
    with contextlib.ExitStack() as stack:
        stack.enter_context(backends.parallel(sglang, case.world, case.shard))
        if case.async_assert:
            stack.enter_context(sglang.environ.SGLANG_ENABLE_ASYNC_ASSERT.override(True))
        if case.dummy_run:
            stack.enter_context(sglang.logits.autotune_dummy_run_mode(run_lm_head=False))
        try:
            result = one.call()
        except Exception as found:
            if case.path in ("fused", "uncovered-on-gpu"):
                raise
            error = type(found).__name__
    outputs = result if isinstance(result, tuple) else (result,)
    return {
        "query": one.recorded.query,
        "cache": one.recorded.cache,
        "pool": [backends.rows_of(one.pool)],
        "result": [out for out in outputs if out is not None],
        "error": error,
    }


def replayed(sglang: Any, case: Case, hooked: bool) -> dict[str, Any]:
    """One call captured in a CUDA graph and replayed with other inputs at the same addresses."""
    import backends

    with backends.parallel(sglang, case.world, case.shard):
        one = prepared(sglang, case, "cuda")
        one.call()
        one.recorded.query.clear()
        one.recorded.cache.clear()
        graph = torch.cuda.CUDAGraph()
        if hooked:
            with torch.cuda.graph(graph):
                one.call()
        for tensor in one.inputs:
            tensor.mul_(-0.5)
        one.slots.add_(1)
        graph.replay() if hooked else one.call()
        torch.cuda.synchronize()
    return {"query": one.recorded.query, "cache": one.recorded.cache, "pool": [backends.rows_of(one.pool)]}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return (
            one.shape == other.shape
            and one.dtype == other.dtype
            and torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
        )
    return bool(one == other)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare sglang's backends with and without the hook, byte for byte.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--site", type=Path, help="folder that holds the package sglang")
    parser.add_argument("--only", default="", help="run the cases whose words hold this text")
    arguments = parser.parse_args()
    if arguments.site:
        sys.path.insert(0, str(arguments.site.resolve()))
    absent.stand_in(arguments.site)
    import backends

    sglang = backends.import_sglang(arguments.device)
    from mlaprep.clients import sglang as hook

    if absent.used:
        print("stood in for packages that are not installed:", ", ".join(sorted(absent.used)))
    failures, fused = 0, "chain" if arguments.device == "cpu" else "fused"
    chosen = [case for case in cases() if arguments.only in str(case)]
    for case in chosen:
        plain = run(sglang, case, arguments.device)
        hook.install()
        before = dict(hook.stats())
        hooked = run(sglang, case, arguments.device)
        after = hook.stats()
        hook.uninstall()
        again = run(sglang, case, arguments.device)
        taken = [name for name, count in after.items() if count != before.get(name, 0)] or ["own"]
        expected = case.path
        if expected == "uncovered-on-gpu":
            expected = "fused" if arguments.device == "cpu" else "no-kernel"
        faults = [name for name in plain if not same(plain[name], hooked[name])]
        faults += [f"{name} after uninstall" for name in plain if not same(plain[name], again[name])]
        if taken != [fused if expected == "fused" else expected]:
            faults.append(f"took {taken}, expected {expected}")
        failures += bool(faults)
        print("FAIL" if faults else "same", case, *faults, sep="  ")
    if arguments.device == "cuda":
        for case in [Case(kind=kind, cache=cache) for kind in ("decode", "verify") for cache in ("fp8", "bf16")]:
            plain = replayed(sglang, case, hooked=False)
            hook.install()
            hooked = replayed(sglang, case, hooked=True)
            fused_calls = hook.stats()["fused"]
            hook.uninstall()
            faults = [name for name in plain if not same(plain[name], hooked[name])]
            faults += [] if fused_calls == 2 else [f"{fused_calls} launches, expected 2"]
            failures += bool(faults)
            chosen.append(case)
            print("FAIL" if faults else "same", "replayed", case, *faults, sep="  ")
    print(f"{len(chosen) - failures} of {len(chosen)} calls the same, torch {torch.__version__}, {arguments.device}")
    return 1 if failures or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
