"""Replies that tell of several builds of one variant."""

from pydantic import Field

from mlaprep.service.schemas import ARCH, DIGEST, KEY, VARIANT_ID, Reply, ResourcesReply


class BuildReply(Reply):
    """One kernel of the store."""

    digest: str = Field(description="sha256 of the cubin", examples=[DIGEST])
    key: str = Field(description="of its entry: source, options, architecture and NVRTC version", examples=[KEY])
    variant_id: str = Field(examples=[VARIANT_ID])
    arch: str = Field(examples=[str(ARCH)])
    nvrtc_version: str = Field(examples=["12.9.86"])
    source_sha256: str = Field(examples=[DIGEST])
    created_at: str = Field(description="UTC", examples=["2026-01-31T12:00:00Z"])
    size: int = Field(description="bytes of cubin", examples=[9760])
    registers: int = Field(description="a thread", examples=[22])
    spill_stores: int = Field(examples=[0])
    spill_loads: int = Field(examples=[0])
    stack_bytes: int = Field(examples=[0])
    shared_bytes: int = Field(examples=[0])
    serves: bool = Field(description="whether whoever asks for the variant is given this one", examples=[True])


class BuildsReply(Reply):
    """Every build of a variant on an architecture."""

    builds: list[BuildReply] = Field(description="the latest first")


class DiffSideReply(ResourcesReply):
    """One of two builds."""

    key: str = Field(examples=[KEY])
    size: int = Field(description="bytes of cubin", examples=[9760])
    nvrtc_version: str = Field(examples=["12.9.86"])
    source_sha256: str = Field(examples=[DIGEST])
    created_at: str = Field(description="UTC", examples=["2026-01-31T12:00:00Z"])


class DiffReply(Reply):
    """How one build became another. Pairs are before and after; what did not change is left out of them."""

    one: DiffSideReply = Field(alias="from")
    other: DiffSideReply = Field(alias="to")
    same: bool = Field(description="whether the cubins are the same bytes", examples=[False])
    source_same: bool = Field(description="whether they were compiled from the same source", examples=[False])
    figures: dict[str, list[int]] = Field(description="resources and size", examples=[{"registers": [22, 24]}])
    opcodes: dict[str, list[int]] = Field(
        description="how often an opcode comes, most changed first", examples=[{"LDG.E.128": [3, 4]}]
    )
    sass: str = Field(
        description="unified diff of the machine code, without addresses; register numbers make no difference",
        examples=["--- …\n+++ …\n@@ -1,4 +1,5 @@\n"],
    )
