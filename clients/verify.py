"""Verification: a launch proved against the unfused chain, byte for byte. ``MLAPREP_VERIFY=1`` turns it on.

The chain runs on scratch memory of T rows, never on the pool. Of the pool, each row that is written is compared,
and rows that must stay as they were: neighbours of the written ones, rows that skipped slots name, the first, the
last and some between. Padding after these rows is watched too.
"""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mlaprep.clients.errors import VerificationFailed
from mlaprep.clients.operands import Operands
from mlaprep.clients.prepared import PreparedLaunch
from mlaprep.clients.reference import destination_rows, places, spec_chain

if TYPE_CHECKING:
    from torch import Tensor

    from mlaprep.clients.handle import KernelHandle

SAMPLED_ROWS: Final = 64
"""Rows of the whole pool that are watched in every call, evenly spaced."""
GUARD_BYTES: Final = 64
"""Bytes of padding that are watched after a row."""

_log: Final = logging.getLogger(__name__)


def run_verified(
    handle: "KernelHandle",
    plan: PreparedLaunch,
    tensors: Sequence[Any],
    operands: Operands,
    dcp_rank: int = 0,
    reserved_slot: int | None = None,
) -> "Tensor | None":
    """Launch, wait, and compare query and pool with the unfused chain. Returns the query as the launch does.

    Raises:
        VerificationFailed: a byte that differs. The pool and ``out`` hold what the kernel wrote.
        DriverError: the driver refused the launch.
    """
    import torch

    spec = handle.spec
    with torch.inference_mode():
        wanted = spec_chain(spec, operands._replace(out=None), write_kv=False) if spec.write_q else None
        watched = None
        if operands.kv_cache is not None and operands.rows:
            watched = _Watched.before(handle, operands, dcp_rank, reserved_slot)
    query = plan.run(tensors)
    with torch.inference_mode():
        if watched is not None:
            _compare_cache(handle, operands, watched)
        if wanted is not None and query is not None:
            _compare_query(handle, operands, query, wanted)
    return query


def tell_skipped(handle: "KernelHandle") -> None:
    """Log that a captured launch is not verified, which would have to wait for the device."""
    _log.warning("MLAPREP_VERIFY: %r is launched while its stream is captured: neither that nor its replays are "
                 "verified", handle)  # fmt: skip


class _Watched(NamedTuple):
    """Rows of a pool ahead of a launch, as bytes."""

    windows: "Tensor"
    """The pool as ``[S, n]`` or ``[pages, page, n]`` uint8: each row with some of the padding behind it."""
    rows: "Tensor"
    """Numbers of the watched rows, ``[N]`` int64, ascending."""
    found: "Tensor"
    """Their bytes, ``[N, n]``."""
    written: "Tensor"
    """For each token that writes, the place of its row among them, ``[t]``."""
    tokens: "Tensor"
    """Which tokens those are, ``[t]``."""
    new: "Tensor"
    """The bytes of their rows by the chain, ``[t, width]``."""

    @classmethod
    def before(cls, handle: "KernelHandle", operands: Operands, dcp_rank: int, reserved_slot: int | None) -> "_Watched":
        import torch

        spec, loc, cache, rows = handle.spec, operands.loc, operands.kv_cache, operands.rows
        assert loc is not None
        assert cache is not None
        row, written = destination_rows(loc, rows, reserved_slot, spec.dcp_world, dcp_rank, spec.dcp_interleave)
        tokens = written.nonzero().flatten()
        touched = row[tokens]
        sampled = torch.linspace(0, rows - 1, min(rows, SAMPLED_ROWS), dtype=torch.float64, device=loc.device).long()
        every = torch.cat([touched - 1, touched, touched + 1, row, loc.long(), sampled]).clamp_(0, rows - 1).unique()
        windows = _windows(cache)
        scratch = torch.empty(operands.tokens, cache.shape[-1], dtype=cache.dtype, device=cache.device)
        own = torch.arange(operands.tokens, device=cache.device, dtype=torch.int64)
        alone = operands._replace(kv_cache=scratch, loc=own, out=None)
        spec_chain(spec, alone, everywhere=True, write_q=False)
        new = scratch.view(torch.uint8)[tokens]
        return cls(windows, every, windows[places(cache, every)], torch.searchsorted(every, touched), tokens, new)


def _windows(cache: "Tensor") -> "Tensor":
    import torch

    size = cache.element_size()
    *strides, _ = (stride * size for stride in cache.stride())
    offset = cache.storage_offset() * size
    width = cache.shape[-1] * size
    last = offset + sum((count - 1) * stride for count, stride in zip(cache.shape, strides, strict=False))
    window = min(max(width, min(strides[-1], width + GUARD_BYTES)), cache.untyped_storage().nbytes() - last)
    return cache.view(torch.uint8).as_strided((*cache.shape[:-1], window), (*strides, 1), offset)


def _compare_cache(handle: "KernelHandle", operands: Operands, watched: _Watched) -> None:
    import torch

    cache = operands.kv_cache
    assert cache is not None
    after = watched.windows[places(cache, watched.rows)]
    wrong = after != watched.found
    width = watched.new.shape[1]
    # Of two tokens with one slot either may win, so a byte is right where any token of its row gives it.
    right = torch.zeros(len(wrong), width, dtype=torch.int32, device=wrong.device)
    right.index_add_(0, watched.written, (after[watched.written, :width] == watched.new).int())
    wrong[watched.written, :width] = right[watched.written] == 0
    if not wrong.any():
        return
    place, byte = wrong.nonzero()[0].tolist()
    row = int(watched.rows[place])
    writers = (watched.written == place).nonzero().flatten().tolist()
    if writers and byte < width:
        wanted = int(watched.new[writers[-1], byte])
        who = f"which token {int(watched.tokens[writers[-1]])} writes"
    else:
        wanted = int(watched.found[place, byte])
        who = "which is padding" if writers else "which no token writes"
    raise _failure(handle, operands, f"cache row {row}, {who},", (row, byte), int(after[place, byte]), wanted, wrong)


def _compare_query(handle: "KernelHandle", operands: Operands, query: "Tensor", wanted: "Tensor") -> None:
    import torch

    found, right = query.detach().view(torch.uint8), wanted.view(torch.uint8)
    wrong = found != right
    if wrong.any():
        where = tuple(wrong.nonzero()[0].tolist())
        what = f"the query of token {where[0]}, head {where[1]}"
        raise _failure(handle, operands, what, where, int(found[where]), int(right[where]), wrong)


def _failure(
    handle: "KernelHandle",
    operands: Operands,
    what: str,
    where: tuple[int, ...],
    found: int,
    wanted: int,
    wrong: "Tensor",
) -> VerificationFailed:
    spec, arch, digest = handle.spec, handle.arch.name, handle.artifact.manifest.cubin_sha256
    return VerificationFailed(
        f"asked to verify {spec.variant_id} for {arch} (cubin sha256 {digest}) in a call of {operands.tokens} tokens "
        f"on {operands.device}; found byte {where[-1]} of {what} to be {found:02x} where the unfused chain gives "
        f"{wanted:02x}, and {int(wrong.sum()) - 1} more such bytes. Set MLAPREP_DISABLE=1, which serves by the chain, "
        "discard what the cache holds, and report the variant, the architecture and the digest",
        variant_id=spec.variant_id,
        arch=arch,
        digest=digest,
        operand="kv_cache" if len(where) == 2 else "query",
        where=where,
    )
