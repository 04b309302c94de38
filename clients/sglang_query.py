"""The query of one sglang attention call in one launch, or None: the one decision of the hook.

A query means that the cache rows are written as well; None means that nothing was. Nothing here changes sglang.
"""

import logging
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mlaprep.clients.errors import KernelNotReady
from mlaprep.clients.sglang_contract import BACKEND, POOL

if TYPE_CHECKING:
    from torch import Tensor

    from mlaprep.clients.client import KernelClient

RESERVED_SLOT: Final = 0
"""sglang's pools pad with slot 0, and their writers skip it; the one of rows without rotary columns does not."""

_POOL_METHODS: Final = ("set_mla_kv_buffer", "_write_mla_kv_buffer", "_scatter_mla_rows", "get_key_buffer")
_log: Final = logging.getLogger(__name__)


class AttentionCall(NamedTuple):
    """The arguments of ``forward_decode`` and ``forward_extend``, by sglang's names."""

    q: "Tensor"
    k: "Tensor"
    v: "Tensor"
    layer: Any
    forward_batch: Any
    save_kv_cache: bool = True
    q_rope: "Tensor | None" = None
    k_rope: "Tensor | None" = None
    cos_sin_cache: "Tensor | None" = None
    is_neox: bool | None = False
    llama_4_scaling: "Tensor | None" = None


class Uncovered(Exception):
    """Why a call goes to sglang's own code; internal to the hook."""


class QueryMaker:
    """Makes queries for the backends of one process, and counts what it made.

    Args:
        modules: sglang's modules by name, as :func:`~mlaprep.clients.sglang_contract.require_known` returns them.
        client: where kernels come from; the process's default one where None.
    """

    def __init__(self, modules: dict[str, ModuleType], client: "KernelClient | None" = None) -> None:
        backend, pools = modules[BACKEND], modules[POOL]
        self._environ: Any = backend.envs
        self._parallel: Any = backend.get_parallel
        self._is_dummy_run: Any = backend.get_in_autotune_dummy_run
        self._pool: Any = pools.MLATokenToKVPool
        self._hybrid_pool: Any = pools.HybridLinearKVPool
        self._client = client
        self._plain_pools: dict[type, bool] = {}
        self.counts: dict[str, int] = {"fused": 0, "chain": 0}

    def query(self, backend: Any, call: AttentionCall, kind: str) -> "Tensor | None":
        """The prepared query ``[T, H, R + D]`` of a call, its cache rows written; or None, and nothing is.

        Args:
            backend: the ``TRTLLMMLABackend`` that was called.
            kind: ``decode``, ``verify`` or ``draft``.

        Raises:
            KernelUnavailable, ArtifactRejected, DriverError: no kernel, for a client with ``on_miss="error"``.
            VerificationFailed: ``MLAPREP_VERIFY`` is on, and a byte differs.
        """
        try:
            return self._query(backend, call, kind)
        except Uncovered as reason:
            self._tell(str(reason), logging.INFO)
        except KernelNotReady as error:
            self._tell("cold-capture", logging.WARNING, error)
        except (TypeError, ValueError) as error:
            # Arguments that no kernel takes; sglang's own code has its own word on them.
            self._tell("arguments", logging.WARNING, error)
        return None

    def is_dummy_run(self) -> bool:
        """Whether sglang discards this forward: under DCP its own code leaves at once and writes nothing."""
        return bool(self._parallel().dcp_enabled and self._is_dummy_run())

    def sharded(self) -> bool:
        return bool(self._parallel().dcp_enabled)

    def _query(self, backend: Any, call: AttentionCall, kind: str) -> "Tensor | None":
        import torch

        layer, batch = call.layer, call.forward_batch
        if self._environ.SGLANG_ENABLE_ASYNC_ASSERT.get():
            raise Uncovered("async-assert")  # the pool's own writer probes its slots
        quantised = backend.data_type == torch.float8_e4m3fn
        if not quantised and backend.data_type != call.q.dtype:
            raise Uncovered("cache-dtype")
        if call.q_rope is None or call.k_rope is None or call.k is None:
            raise Uncovered("no-rope-operands")
        if kind == "draft" and quantised and (call.cos_sin_cache is not None or call.llama_4_scaling is not None):
            # There sglang scales before it rounds, and leaves the rotation to the model.
            raise Uncovered("draft-fp8-options")
        heads, rank = layer.tp_q_head_num, layer.v_head_dim
        rope_dim = layer.head_dim - rank
        options: dict[str, Any] = {"layout": "fp8" if quantised else "same"}
        if call.cos_sin_cache is not None and quantised:
            if call.cos_sin_cache.dtype != torch.float32:
                raise Uncovered("rope-table-dtype")
            options["rope"] = "neox" if call.is_neox else "interleaved"
            options["positions"] = batch.positions
            options["cos_sin_cache"] = call.cos_sin_cache
        q_nope = _by_head(call.q, heads, rank)
        q_rope = _by_head(call.q_rope, heads, rope_dim) if rope_dim else None
        k_nope = k_rope = cache = loc = None
        if call.save_kv_cache:
            loc = batch.out_cache_loc
            if loc is None:
                raise Uncovered("no-loc")
            cache = self._cache(backend.token_to_kv_pool, layer, batch)
            world, rank_of_shard = self._shard(backend.token_to_kv_pool)
            options |= {"dcp_world": world, "dcp_rank": rank_of_shard}
            k_nope, k_rope = _row(call.k), _row(call.k_rope) if rope_dim else None
            if rope_dim:
                options["reserved_slot"] = RESERVED_SLOT
            elif world > 1:
                raise Uncovered("dcp-without-rope-columns")  # sglang's writer of such rows knows no owners
        else:
            options["write_kv"] = False
        return self._prepare((q_nope, q_rope, k_nope, k_rope, cache, loc), options)

    def _prepare(self, tensors: "tuple[Tensor | None, ...]", options: dict[str, Any]) -> "Tensor | None":
        from mlaprep.clients.dispatch import default_client, fused_prepare
        from mlaprep.clients.reference import prepare_chain

        client = default_client() if self._client is None else self._client
        q_nope = tensors[0]
        assert q_nope is not None
        if client.switches.disable:
            raise Uncovered("disabled")
        if q_nope.device.type == "cpu":
            query: Tensor | None = prepare_chain(*tensors, **options)
            self.counts["chain"] += 1
            return query
        query = fused_prepare(*tensors, client=client, **options)
        if query is None:
            raise Uncovered("no-kernel")  # the client has counted and told why
        self.counts["fused"] += 1
        return query

    def _cache(self, pool: Any, layer: Any, batch: Any) -> "Tensor":
        """The layer's rows, by the pool's own mapping, after its own wait for a transfer."""
        rows = self._rows_of(pool)
        if rows.requires_physical_write_loc and not batch.out_cache_loc_is_physical:
            raise Uncovered("virtual-loc")
        cache: Tensor = pool.get_key_buffer(layer.layer_id)
        return cache

    def _shard(self, pool: Any) -> tuple[int, int]:
        """(world, rank) by which the pool reads the batch's slots; (1, 0) where they are rows of this rank already."""
        rows = self._rows_of(pool)
        if rows.write_loc_is_dcp_resolved or rows.dcp_replicated:
            return 1, 0
        parallel = self._parallel()
        return (parallel.attn_dcp_size, parallel.attn_dcp_rank) if parallel.dcp_enabled else (1, 0)

    def _rows_of(self, pool: Any) -> Any:
        """The pool that holds the rows, where it stores them as plain ``[S, 1, R + D]``."""
        rows = pool.full_kv_pool if type(pool) is self._hybrid_pool else pool
        kind = type(rows)
        plain = self._plain_pools.get(kind)
        if plain is None:
            plain = issubclass(kind, self._pool) and all(
                getattr(kind, name) is getattr(self._pool, name) for name in _POOL_METHODS
            )
            self._plain_pools[kind] = plain
        if not plain or rows.dsa_kv_cache_store_fp8 or rows.kv_scale_buffer is not None:
            raise Uncovered("pool")
        return rows

    def _tell(self, reason: str, level: int, error: Exception | None = None) -> None:
        count = self.counts.get(reason, 0)
        self.counts[reason] = count + 1
        if not count:
            _log.log(level, "sglang's own path is taken (%s)%s", reason, f": {error}" if error else "")


def _by_head(tensor: "Tensor", heads: int, width: int) -> "Tensor":
    return tensor if tensor.dim() == 3 else tensor.view(-1, heads, width)


def _row(tensor: "Tensor") -> "Tensor":
    return tensor if tensor.dim() == 2 else tensor.view(tensor.shape[0], -1)
