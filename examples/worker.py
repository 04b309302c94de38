"""What an inference engine does with mlaprep: one call a layer, fused where a kernel covers it.

Runs anywhere torch runs. Without a CUDA device every call takes the unfused chain, whose bytes are the same.

    python examples/worker.py                                    # kernels from this machine
    MLAPREP_URL=http://kernels:8400 python examples/worker.py    # kernels from a service
"""

import torch

from mlaprep.clients import KernelClient, prepare

HEADS, RANK, ROPE = 12, 512, 64  # kimi-k3 at TP 8
SLOTS, LAYERS, STEPS = 4096, 4, 3


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    caches = [torch.zeros(SLOTS, RANK + ROPE, dtype=torch.float8_e4m3fn, device=device) for _ in range(LAYERS)]
    # "fallback": no kernel at hand means the unfused chain, never a compile in the serving path.
    with KernelClient(on_miss="compile" if device.type == "cuda" else "fallback") as client:
        if device.type == "cuda":
            # Ahead of serving, and of any graph capture: the first call then finds its kernel loaded.
            client.load(num_heads=HEADS, kv_lora_rank=RANK, rope_dim=ROPE)
        for step in range(STEPS):
            decode(step, caches, client)
        print(f"{STEPS} steps of {LAYERS} layers on {device}: {client.stats()}")


def decode(step: int, caches: list[torch.Tensor], client: KernelClient, tokens: int = 8) -> None:
    """One decode step of a batch: each layer writes its cache rows and gets its query ready."""
    device = caches[0].device
    loc = torch.arange(tokens, device=device) + step * tokens
    for cache in caches:
        # An engine's projections hand these over as views; no copy is needed.
        query = torch.randn(tokens, HEADS, RANK + ROPE, dtype=torch.bfloat16, device=device)
        latent = torch.randn(tokens, RANK + ROPE, dtype=torch.bfloat16, device=device)
        q_fp8 = prepare(
            query[..., :RANK], query[..., RANK:], latent[:, :RANK], latent[:, RANK:], cache, loc, client=client
        )
        assert q_fp8.shape == (tokens, HEADS, RANK + ROPE)


if __name__ == "__main__":
    main()
