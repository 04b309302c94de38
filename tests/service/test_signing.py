"""A service that signs: every manifest it hands out, under today's key, whatever its store holds."""

from pathlib import Path

import pytest
from service_kit import Client, ClientMaker

from mlaprep.kernels_cache.artifact import Manifest
from mlaprep.kernels_cache.errors import ArtifactError
from mlaprep.kernels_cache.key_files import generate_key
from mlaprep.kernels_cache.signing import SigningKey
from mlaprep.kernels_cache.trust import TrustedKeys
from mlaprep.service.settings import read_settings
from mlaprep.templates.arch import Arch
from mlaprep.templates.errors import SpecError
from mlaprep.templates.spec import KernelSpec


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, SigningKey]:
    return {name: generate_key(tmp_path / name) for name in ("old", "new")}


def manifest_of(client: Client, method: str, spec: KernelSpec, arch: Arch, query: str = "") -> Manifest:
    reply = client.request(method, f"/v1/kernels/{arch}/{spec.variant_id}{query}")
    assert reply.status_code in (200, 201), reply.text
    return Manifest.from_dict(reply.json()["manifest"])


def test_every_way_to_a_manifest_is_signed(
    make_client: ClientMaker, keys: dict[str, SigningKey], tmp_path: Path, spec: KernelSpec, arch: Arch
) -> None:
    client = make_client(signing_key=tmp_path / "old")
    trusted = TrustedKeys((keys["old"].public,))
    built = manifest_of(client, "PUT", spec, arch, "?inline=true")
    for manifest in (built, manifest_of(client, "PUT", spec, arch), manifest_of(client, "GET", spec, arch)):
        trusted.require(manifest)
        assert manifest == built
    assert client.get("/readyz").json()["signing_key"] == keys["old"].public.key_id


def test_a_new_key_signs_what_is_stored_and_replicas_share_a_store(
    make_client: ClientMaker, keys: dict[str, SigningKey], tmp_path: Path, spec: KernelSpec, arch: Arch
) -> None:
    unsigned = manifest_of(make_client(), "PUT", spec, arch)
    assert unsigned.signature is None
    old, new = (manifest_of(make_client(signing_key=tmp_path / name), "GET", spec, arch) for name in keys)
    assert old == keys["old"].sign(unsigned)
    assert new == keys["new"].sign(unsigned)
    with pytest.raises(ArtifactError):
        TrustedKeys((keys["new"].public,)).require(old)
    assert manifest_of(make_client(), "GET", spec, arch) == unsigned


def test_a_service_without_a_key_passes_on_what_its_records_carry(
    make_client: ClientMaker, keys: dict[str, SigningKey], tmp_path: Path, spec: KernelSpec, arch: Arch
) -> None:
    client = make_client()
    stored = client.service.store
    unsigned = manifest_of(client, "PUT", spec, arch)
    artifact = stored.get(unsigned.key)
    assert artifact is not None
    stored.publish(keys["old"].sign_artifact(artifact))
    assert manifest_of(client, "GET", spec, arch) == keys["old"].sign(unsigned)
    assert manifest_of(make_client(signing_key=tmp_path / "new"), "GET", spec, arch) == keys["new"].sign(unsigned)


def test_the_key_has_no_part_in_what_is_built(
    make_client: ClientMaker, keys: dict[str, SigningKey], tmp_path: Path, spec: KernelSpec, arch: Arch
) -> None:
    signed = make_client(signing_key=tmp_path / "old", cache_dir=tmp_path / "a")
    unsigned = make_client(cache_dir=tmp_path / "b")
    assert manifest_of(signed, "PUT", spec, arch).key == manifest_of(unsigned, "PUT", spec, arch).key


@pytest.mark.parametrize("fault", ["missing", "readable", "garbage", "directory"])
def test_a_key_that_cannot_be_used_keeps_the_service_from_starting(
    make_client: ClientMaker, keys: dict[str, SigningKey], tmp_path: Path, fault: str
) -> None:
    path = tmp_path / "old"
    if fault == "missing":
        path.unlink()
    elif fault == "readable":
        path.chmod(0o640)
    elif fault == "garbage":
        path.write_text("no key")
    else:
        path = tmp_path
    with pytest.raises(SpecError, match="MLAPREP_SIGNING_KEY"):
        make_client(signing_key=path)


def test_an_empty_variable_does_not_mean_unsigned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLAPREP_SIGNING_KEY", "")
    with pytest.raises(SpecError, match="MLAPREP_SIGNING_KEY: found an empty string"):
        read_settings()
    monkeypatch.delenv("MLAPREP_SIGNING_KEY")
    assert read_settings().signing_key is None
