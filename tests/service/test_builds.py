"""Several builds of one variant in one store: listed, and compared."""

import dataclasses

import pytest
from service_kit import Client

from mlaprep.kernels_cache.artifact import KernelArtifact
from mlaprep.kernels_cache.key import cache_key
from mlaprep.kernels_cache.revocation import Revocation
from mlaprep.service import disassembler
from mlaprep.service.build_schemas import BuildsReply, DiffReply
from mlaprep.service.disassembler import find_nvdisasm
from mlaprep.service.errors import DisassemblerUnavailable
from mlaprep.templates.arch import Arch
from mlaprep.templates.render import render
from mlaprep.templates.spec import KernelSpec

SPEC, ARCH = KernelSpec(num_heads=12), Arch("sm_100a")
KERNEL = f"/v1/kernels/{ARCH}/{SPEC.variant_id}"
RESERVED = KernelSpec(num_heads=12, reserved_slot=True)


def older_build(client: Client, version: str = "12.8.61") -> KernelArtifact:
    """Put another variant's code into the store as what an older compiler made of this one."""
    served = client.service.builder.get_or_compile(SPEC, ARCH).artifact
    code = client.service.compiler.compile(render(RESERVED), ARCH)
    manifest = served.manifest
    key = cache_key(source=served.source, options=manifest.options, arch=ARCH.name, nvrtc_version=version)
    older = dataclasses.replace(
        code.manifest,
        spec=manifest.spec,
        variant_id=manifest.variant_id,
        source_sha256=manifest.source_sha256,
        launch=manifest.launch,
        key=key,
        nvrtc_version=version,
        created_at="2025-01-01T00:00:00Z",
    )
    artifact = KernelArtifact(older, code.cubin, served.source)
    client.service.store.publish(artifact)
    return artifact


@pytest.fixture
def nvdisasm() -> None:
    try:
        find_nvdisasm()
    except DisassemblerUnavailable as error:
        pytest.skip(str(error))


def test_builds_lists_what_serves_and_what_an_older_compiler_made(client: Client) -> None:
    assert client.get(f"{KERNEL}/builds").json() == {"builds": []}
    older = older_build(client)
    reply = client.get(f"{KERNEL}/builds")
    BuildsReply.model_validate_json(reply.content, strict=True)
    builds = reply.json()["builds"]
    assert [(build["serves"], build["nvrtc_version"] == "12.8.61") for build in builds] == [
        (True, False),
        (False, True),
    ]
    assert builds[1]["digest"] == older.digest
    assert client.get(KERNEL).json()["manifest"]["cubin_sha256"] == builds[0]["digest"]


def test_an_older_build_is_compared_with_the_one_that_serves(client: Client, nvdisasm: None) -> None:
    older = older_build(client)
    reply = client.get(f"{KERNEL}/diff?from={older.digest[:12]}")
    DiffReply.model_validate_json(reply.content, strict=True)
    found = reply.json()
    assert found["from"]["digest"] == older.digest
    assert (found["same"], found["source_same"]) == (False, True)
    before, after = found["figures"]["instructions"]
    assert before > after > 0
    assert (found["from"]["instructions"], found["to"]["instructions"]) == (before, after)
    assert "-ULDC" in found["sass"] or "-LDC" in found["sass"]
    back = client.get(f"{KERNEL}/diff?to={older.digest}").json()
    assert back["figures"]["instructions"] == [after, before]
    both = client.get(f"{KERNEL}/diff?from={older.digest}&to={older.digest}").json()
    assert (both["same"], both["figures"], both["opcodes"], both["sass"]) == (True, {}, {}, "")


def test_builds_of_two_architectures_are_compared(client: Client, nvdisasm: None) -> None:
    client.put(KERNEL)
    hopper = client.put(KERNEL.replace("sm_100a", "sm_90a")).json()["manifest"]
    found = client.get(f"{KERNEL}/diff?from={hopper['cubin_sha256']}").json()
    assert (found["from"]["arch"], found["to"]["arch"]) == ("sm_90a", "sm_100a")
    assert found["sass"].startswith(f"--- {SPEC.variant_id} sm_90a\n+++ {SPEC.variant_id} sm_100a\n@@ ")


@pytest.mark.parametrize(
    ("query", "status", "slug"),
    [
        ("?from=00000000", 404, "artifact-not-found"),
        ("?from=0000000", 422, "invalid-request"),
        ("?from=../../etc", 422, "invalid-request"),
        ("?from=00000000&from=00000000", 422, "invalid-request"),
        ("?since=00000000", 422, "invalid-request"),
        ("", 404, "kernel-not-built"),
    ],
)
def test_what_names_no_build_is_refused(client: Client, query: str, status: int, slug: str) -> None:
    reply = client.get(f"{KERNEL}/diff{query}")
    assert (reply.status_code, reply.json()["type"]) == (status, f"urn:mlaprep:problem:{slug}")


def test_a_revoked_build_is_neither_listed_nor_compared(client: Client) -> None:
    older = older_build(client)
    client.service.builder.revocations.add(Revocation.of(older.manifest, "wrong"))
    assert [build["serves"] for build in client.get(f"{KERNEL}/builds").json()["builds"]] == [True]
    reply = client.get(f"{KERNEL}/diff?from={older.digest}")
    assert (reply.status_code, reply.json()["type"]) == (410, "urn:mlaprep:problem:kernel-revoked")


def test_a_diff_without_nvdisasm_says_what_is_missing(
    client: Client, monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    client.put(KERNEL)
    monkeypatch.setattr(disassembler, "_wheel_files", lambda: iter(()))
    monkeypatch.setenv("PATH", str(tmp_path))
    reply = client.get(f"{KERNEL}/diff")
    assert (reply.status_code, reply.json()["type"]) == (503, "urn:mlaprep:problem:disassembler-unavailable")
    assert len(client.get(f"{KERNEL}/builds").json()["builds"]) == 1
