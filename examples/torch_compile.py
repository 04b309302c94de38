"""A decode layer under torch.compile, in one graph for every batch size.

Runs anywhere torch and a C++ compiler (for torch's CPU code) are. Without a CUDA device the operation is the unfused
chain, whose bytes are the same.

    python examples/torch_compile.py
"""

import torch

from mlaprep.clients import KernelClient, prepare, torch_op

HEADS, RANK, ROPE, SLOTS = 12, 512, 64, 4096  # kimi-k3 at TP 8


def layer(query: torch.Tensor, latent: torch.Tensor, kv_cache: torch.Tensor, loc: torch.Tensor) -> torch.Tensor:
    """What surrounds the operation is the compiler's to fuse; the operation stays one launch."""
    query = query * 0.5
    return torch_op.prepare(
        query[..., :RANK], query[..., RANK:], latent[:, :RANK], latent[:, RANK:], kv_cache, loc, client="decode"
    )


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    # "fallback": no kernel at hand means the unfused chain, never a compile in the serving path.
    with KernelClient(on_miss="compile" if device.type == "cuda" else "fallback") as client:
        torch_op.name_client("decode", client)
        for tokens in (2, 5, 16):
            query = torch.randn(tokens, HEADS, RANK + ROPE, dtype=torch.bfloat16, device=device)
            latent = torch.randn(tokens, RANK + ROPE, dtype=torch.bfloat16, device=device)
            loc = torch.arange(tokens, device=device)
            kv_cache, plain = (torch.zeros(SLOTS, RANK + ROPE, dtype=torch.uint8, device=device) for _ in range(2))
            q_fp8 = compiled(query, latent, kv_cache, loc)
            half = query * 0.5
            wanted = prepare(
                half[..., :RANK], half[..., RANK:], latent[:, :RANK], latent[:, RANK:], plain, loc, client=client
            )
            assert torch.equal(q_fp8.view(torch.uint8), wanted.view(torch.uint8))
            assert torch.equal(kv_cache, plain)
        print(f"3 batch sizes on {device}, one graph, the bytes of an eager call")


if __name__ == "__main__":
    main()
