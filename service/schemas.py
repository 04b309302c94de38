"""Replies of the service, for its OpenAPI document.

Routes write their JSON themselves, the tests hold it against these models.
"""

from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from mlaprep.kernels_cache.key import SCHEMA
from mlaprep.templates.arch import Arch
from mlaprep.templates.render import ENTRY
from mlaprep.templates.spec import KernelSpec

SPEC: Final = KernelSpec(num_heads=12)
"""The variant that every example shows."""

VARIANT_ID: Final = SPEC.variant_id
ARCH: Final = Arch("sm_100a")
DIGEST: Final = "3f0a" * 16
KEY: Final = "9674" * 16


class Reply(BaseModel):
    """What every reply has in common."""

    model_config = ConfigDict(extra="forbid")


class ManifestReply(Reply):
    """What is known of one compiled kernel."""

    schema_: int = Field(alias="schema", examples=[SCHEMA])
    variant_id: str = Field(examples=[VARIANT_ID])
    spec: dict[str, Any] = Field(description="every field of the kernel specification", examples=[SPEC.to_dict()])
    arch: str = Field(examples=[str(ARCH)])
    key: str = Field(description="cache key", pattern="^[0-9a-f]{64}$", examples=[KEY])
    cubin_sha256: str = Field(
        description="digest of the bytes at /v1/artifacts", pattern="^[0-9a-f]{64}$", examples=[DIGEST]
    )
    cubin_size: int = Field(examples=[9760])
    source_sha256: str = Field(pattern="^[0-9a-f]{64}$", examples=["6bd3" * 16])
    entry: str = Field(examples=[ENTRY])
    launch: dict[str, Any] = Field(
        description="what a launcher must know", examples=[{"threads_per_row": 72, "pdl": True}]
    )
    registers: int = Field(description="a thread", examples=[20])
    spill_stores: int = Field(description="bytes", examples=[0])
    spill_loads: int = Field(description="bytes", examples=[0])
    stack_bytes: int = Field(examples=[0])
    shared_bytes: int = Field(description="static, a block", examples=[0])
    nvrtc_version: str = Field(examples=["12.9.86"])
    options: list[str] = Field(examples=[["-arch=sm_100a", "-std=c++17"]])
    compile_ms: float = Field(examples=[41.7])
    created_at: str = Field(description="UTC, RFC 3339", examples=["2026-01-31T12:00:00Z"])
    signature: str | None = Field(
        description="ed25519:<key id>:<base64>; null where the service has no signing key", examples=[None]
    )


class KernelReply(Reply):
    """A built kernel."""

    manifest: ManifestReply
    cached: bool = Field(description="false where this request had it compiled", examples=[True])
    cubin_base64: str | None = Field(None, description="with ?inline=true: the cubin")
    source: str | None = Field(None, description="with ?inline=true: the CUDA source it was compiled from")


class ResourcesReply(Reply):
    """What a kernel takes, read off its cubin."""

    variant_id: str = Field(examples=[VARIANT_ID])
    arch: str = Field(examples=[str(ARCH)])
    digest: str = Field(description="sha256 of the cubin", examples=[DIGEST])
    registers: int = Field(description="a thread", examples=[22])
    stack_bytes: int = Field(description="a thread", examples=[0])
    spill_stores: int | None = Field(description="bytes, by the compiler's log", examples=[0])
    spill_loads: int | None = Field(description="bytes, by the compiler's log", examples=[0])
    shared_bytes: int = Field(description="static, a block", examples=[0])
    constant_bytes: int = Field(description="all banks, kernel arguments included", examples=[1072])
    data_bytes: int = Field(description="global variables of the module", examples=[32])
    code_bytes: int = Field(examples=[2304])
    instructions: int = Field(description="without what pads the code", examples=[128])
    kinds: dict[str, int] = Field(
        description="instructions by class", examples=[{"global loads": 3, "global stores": 1, "conversions": 8}]
    )


class VariantArchReply(Reply):
    """One variant on one architecture. Sizes and digests are null until it is built."""

    arch: str = Field(examples=[str(ARCH)])
    state: Literal["built", "building", "failed", "missing"]
    size: int | None = Field(description="bytes of cubin", examples=[9760])
    registers: int | None = Field(examples=[20])
    spill_stores: int | None = Field(examples=[0])
    spill_loads: int | None = Field(examples=[0])
    stack_bytes: int | None = Field(examples=[0])
    shared_bytes: int | None = Field(examples=[0])
    digest: str | None = Field(description="sha256 of the cubin", examples=[DIGEST])
    nvrtc_version: str | None = Field(examples=["12.9.86"])
    compile_ms: float | None = Field(examples=[41.7])
    created_at: str | None = Field(examples=["2026-01-31T12:00:00Z"])
    hits: int = Field(description="times this process gave it out since it started", examples=[3])
    last_use: str | None = Field(description="when it last did, UTC", examples=["2026-01-31T12:00:01Z"])


class VariantReply(Reply):
    """One variant."""

    variant_id: str = Field(examples=[VARIANT_ID])
    spec: dict[str, Any] = Field(description="every field of the kernel specification", examples=[SPEC.to_dict()])
    models: list[str] = Field(description="presets of this shape", examples=[["kimi-k3"]])
    archs: list[VariantArchReply]


class VariantsReply(Reply):
    """One page of variants."""

    variants: list[VariantReply]
    total: int = Field(description="variants from the cursor on", examples=[71])
    next_cursor: str | None = Field(description="cursor of the next page, if there is one", examples=[None])


class MissReply(Reply):
    """A kernel that workers asked for and lacked."""

    variant_id: str = Field(examples=[VARIANT_ID])
    arch: str = Field(examples=[str(ARCH)])
    models: list[str] = Field(description="presets of this shape", examples=[["kimi-k3"]])
    state: Literal["built", "building", "failed", "missing"] = Field(description="by now")
    count: int = Field(description="times it was lacking", examples=[8])
    reasons: dict[str, int] = Field(description="the same by reason", examples=[{"compiled": 8}])
    first_seen: str = Field(description="UTC", examples=["2026-01-31T12:00:00Z"])
    last_seen: str = Field(description="UTC", examples=["2026-01-31T12:00:07Z"])


class MissesReply(Reply):
    """One page of misses."""

    misses: list[MissReply]
    total: int = Field(description="misses from the cursor on", examples=[1])
    next_cursor: str | None = Field(description="cursor of the next page, if there is one", examples=[None])


class MissesRecordedReply(Reply):
    """What became of a report."""

    recorded: int = Field(description="entries that were counted", examples=[1])
    ignored: int = Field(description="entries for kernels not known yet, of which there were too many", examples=[0])


class RevocationReply(Reply):
    """A kernel that must not be used."""

    key: str = Field(description="not built again", pattern="^[0-9a-f]{64}$", examples=[KEY])
    digest: str = Field(description="sha256 of the cubin", pattern="^[0-9a-f]{64}$", examples=[DIGEST])
    variant_id: str = Field(description="empty where the record is damaged", examples=[VARIANT_ID])
    arch: str = Field(description="empty where the record is damaged", examples=[str(ARCH)])
    reason: str = Field(examples=["wrong results at 129 tokens"])
    revoked_at: str = Field(description="UTC", examples=["2026-01-31T12:00:00Z"])


class RevokedReply(Reply):
    """What a revocation came to."""

    revocation: RevocationReply


class RevocationsReply(Reply):
    """Everything that is revoked."""

    revocations: list[RevocationReply]


class JobFailureReply(Reply):
    """A kernel that a warm-up could not build."""

    variant_id: str = Field(examples=[VARIANT_ID])
    arch: str = Field(examples=[str(ARCH)])
    detail: str = Field(examples=["the compiler took longer than 30 s"])


class WarmupReply(Reply):
    """A warm-up job and how far it is."""

    id: str = Field(description="names the job", examples=["0f3a6c1d2b4e5f60"])
    state: Literal["queued", "running", "done", "failed", "cancelled", "interrupted"] = Field(examples=["running"])
    total: int = Field(description="kernels of the plan, each once", examples=[40])
    done: int = Field(description="kernels behind it: built, cached and failed", examples=[12])
    built: int = Field(description="compiled for this job", examples=[10])
    cached: int = Field(description="found built", examples=[2])
    failed: int = Field(examples=[0])
    created_at: str = Field(examples=["2026-01-31T12:00:00Z"])
    started_at: str | None = Field(examples=["2026-01-31T12:00:00Z"])
    finished_at: str | None = Field(examples=[None])
    eta_s: float | None = Field(description="seconds left at the pace so far", examples=[1.4])
    failures: list[JobFailureReply] = Field(description="the first of them", examples=[[]])
    note: str = Field(description="what it waits for, such as a worker", examples=[""])
    plan: dict[str, Any] | None = Field(
        default=None,
        description="the plan, every kernel spelled out; not in lists",
        examples=[{"kernels": [{"variant_id": VARIANT_ID, "arch": [str(ARCH)]}]}],
    )


class WarmupsReply(Reply):
    """Warm-up jobs, the latest first."""

    warmups: list[WarmupReply]


class PresetVariantReply(Reply):
    """The default variant of a preset at one tensor-parallel degree."""

    tp: int = Field(examples=[8])
    num_heads: int = Field(description="on one rank", examples=[12])
    variant_id: str = Field(examples=[VARIANT_ID])


class PresetReply(Reply):
    """What a model's public configuration says of its MLA layers."""

    name: str = Field(examples=["kimi-k3"])
    num_heads: int = Field(description="of the whole model", examples=[96])
    kv_lora_rank: int = Field(examples=[512])
    rope_dim: int = Field(examples=[64])
    rope: str = Field(examples=["none"])
    layout: str = Field(examples=["fp8"])
    variants: list[PresetVariantReply]


class PresetsReply(Reply):
    """Every known model."""

    presets: list[PresetReply]


class ArchReply(Reply):
    """One architecture."""

    name: str = Field(examples=[str(ARCH)])
    capability: str = Field(description="compute capability", examples=["10.0"])
    pdl: bool = Field(description="whether it has programmatic dependent launch", examples=[True])
    default: bool = Field(description="whether it is built where none is named", examples=[True])
    buildable: bool | None = Field(description="whether this NVRTC builds it; null where no compiler runs")


class ArchsReply(Reply):
    """Every known architecture."""

    nvrtc_version: str | None = Field(examples=["12.9.86"])
    archs: list[ArchReply]


class HealthReply(Reply):
    """The process answers."""

    status: Literal["ok"] = Field(examples=["ok"])


class CompilerReply(Reply):
    """The compile processes."""

    status: Literal["idle", "starting", "ready", "unavailable", "closed"] = Field(examples=["ready"])
    nvrtc_version: str | None = Field(examples=["12.9.86"])
    missing: str | None = Field(description="the library that keeps it from working", examples=[None])
    reason: str | None = Field(description="what is wrong with that library", examples=[None])
    processes: int = Field(description="running now", examples=[2])
    queued: int = Field(examples=[0])


class StoreReply(Reply):
    """The kernel store's counters since start, and what it holds."""

    hits: int = Field(examples=[40])
    misses: int = Field(examples=[2])
    damaged: int = Field(examples=[0])
    quarantined: int = Field(examples=[0])
    evicted: int = Field(examples=[0])
    write_errors: int = Field(examples=[0])
    differing: int = Field(examples=[0])
    entries: int = Field(examples=[12])
    bytes: int = Field(examples=[398000])


class CountersReply(Reply):
    """What this process did since it started."""

    hits: int = Field(examples=[40])
    misses: int = Field(examples=[2])
    compiles: int = Field(examples=[2])
    joined: int = Field(examples=[1])
    failures: int = Field(examples=[0])
    remembered_failures: int = Field(examples=[0])
    waiting: int = Field(examples=[0])
    building: int = Field(examples=[0])
    crashes: int = Field(examples=[0])
    timeouts: int = Field(examples=[0])


class SharedReply(Reply):
    """The Redis that replicas share, as this process sees it; counts since start."""

    state: str = Field(description="up, down, refusing (it keeps nothing new) or closed", examples=["up"])
    reason: str = Field(description="why it is not up", examples=[""])
    place: str = Field(description="its address, without secrets", examples=["redis://redis:6379/0"])
    hits: int = Field(examples=[12])
    misses: int = Field(examples=[2])
    damaged: int = Field(examples=[0])
    differing: int = Field(examples=[0])
    write_errors: int = Field(examples=[0])
    owed: int = Field(description="kernels to be published once it takes them", examples=[0])
    timeouts: int = Field(examples=[0])
    errors: int = Field(description="calls whose connection failed", examples=[0])
    opened: int = Field(description="times that it was left alone", examples=[0])
    leases: int = Field(description="keys held for compiling", examples=[2])
    lease_waits: int = Field(description="keys that another replica held", examples=[0])


class ReadyReply(Reply):
    """Whether this process can do its work, and why not."""

    ready: bool = Field(examples=[True])
    reasons: list[str] = Field(description="why it is not ready", examples=[[]])
    warnings: list[str] = Field(description="what is wrong without keeping it from working", examples=[[]])
    read_only: bool = Field(examples=[False])
    indexing: bool = Field(description="whether the store is read for the first time; listings wait", examples=[False])
    signing_key: str | None = Field(description="id of the key that signs what is served", examples=[None])
    compiler: CompilerReply
    store: StoreReply
    shared: SharedReply | None = Field(description="null where none is configured")
    counters: CountersReply


class FieldProblemReply(Reply):
    """One field at fault."""

    field: str = Field(examples=["num_heads"])
    found: str = Field(description="class of the value, never the value", examples=["an integer that is not allowed"])
    allowed: str = Field(examples=["an integer from 1 to 256"])


class ProblemReply(Reply):
    """Problem details, RFC 9457."""

    type: str = Field(examples=["urn:mlaprep:problem:invalid-spec"])
    title: str = Field(examples=["The kernel specification is not valid"])
    status: int = Field(examples=[422])
    detail: str = Field(examples=["num_heads: found an integer that is not allowed; allowed: an integer from 1 to 256"])
    problems: list[FieldProblemReply] | None = None
