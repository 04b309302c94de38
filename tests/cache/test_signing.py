"""Signatures of manifests: what they cover, whose they are, and which keys may be configured."""

import base64
import contextlib
import dataclasses
import os
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cache.samples import make_artifact

from mlaprep.kernels_cache import index
from mlaprep.kernels_cache.artifact import Manifest
from mlaprep.kernels_cache.disk import DiskStore
from mlaprep.kernels_cache.errors import ArtifactError, SigningError
from mlaprep.kernels_cache.key_files import generate_key, read_public_keys, read_signing_key
from mlaprep.kernels_cache.signing import CONTEXT, PublicKey, SigningKey, signed_bytes
from mlaprep.kernels_cache.store import KernelStore, MemoryStore
from mlaprep.kernels_cache.trust import TrustedKeys

ARTIFACT = make_artifact()
MANIFEST = ARTIFACT.manifest
OTHER_MEMBERS: dict[str, Any] = {
    "variant_id": "mla_prepare-h16-r512-d64-bf16-fp8-norope-i64-pdl",
    "spec": {"num_heads": 16},
    "arch": "sm_100a",
    "key": "1" * 64,
    "cubin_sha256": "2" * 64,
    "cubin_size": 1,
    "source_sha256": "3" * 64,
    "entry": "another",
    "launch": {"threads_per_row": 36},
    "registers": 33,
    "spill_stores": 1,
    "spill_loads": 1,
    "stack_bytes": 1,
    "shared_bytes": 1,
    "nvrtc_version": "12.8.93",
    "options": ("-arch=sm_100a",),
    "compile_ms": 1.0,
    "created_at": "2026-02-28T12:00:00Z",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys")


@pytest.fixture(scope="module")
def key(folder: Path) -> SigningKey:
    return generate_key(folder / "one.pem")


@pytest.fixture(scope="module")
def other(folder: Path) -> SigningKey:
    return generate_key(folder / "two.pem")


def reason(trusted: TrustedKeys, manifest: Manifest) -> str:
    with pytest.raises(ArtifactError) as caught:
        trusted.require(manifest)
    return caught.value.reason


class TestSignatures:
    def test_a_signature_is_the_same_everywhere_and_changes_nothing_else(self, key: SigningKey) -> None:
        signed = key.sign(MANIFEST)
        assert signed == key.sign(MANIFEST) == key.sign(signed)
        assert dataclasses.replace(signed, signature=None) == MANIFEST
        assert signed.key == MANIFEST.key
        assert Manifest.from_json(signed.to_json(), sealed=True) == signed
        TrustedKeys((key.public,)).require(signed)

    def test_the_table_of_members_is_whole(self) -> None:
        names = {field.name for field in dataclasses.fields(Manifest) if field.init}
        assert names - {"schema", "signature"} == set(OTHER_MEMBERS)

    @pytest.mark.parametrize("member", OTHER_MEMBERS)
    def test_every_member_is_covered(self, key: SigningKey, member: str) -> None:
        signed = key.sign(MANIFEST)
        changed = dataclasses.replace(signed, **{member: OTHER_MEMBERS[member]})
        assert reason(TrustedKeys((key.public,)), changed) == "bad-signature"

    def test_what_is_signed_is_as_documented(self) -> None:
        """Frozen: a release that signed other bytes would refuse everything signed before."""
        assert signed_bytes(MANIFEST).startswith(CONTEXT + b'{"arch":"sm_90a","compile_ms":48.5,"created_at":"2026')
        assert b'"signature"' not in signed_bytes(MANIFEST)
        assert b'"schema":1' in signed_bytes(MANIFEST)

    def test_a_known_key_makes_a_known_signature(self) -> None:
        """The first key of RFC 8032, section 7.1."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        seed = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
        key = SigningKey(Ed25519PrivateKey.from_private_bytes(seed))
        assert key.public.raw.hex() == "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
        assert key.public.key_id == "21fe31dfa154a261"
        assert key.sign(MANIFEST).signature is not None
        assert PublicKey.parse(key.public.text) == key.public

    def test_rotation(self, key: SigningKey, other: SigningKey) -> None:
        both = TrustedKeys((key.public, other.public))
        both.require(key.sign(MANIFEST))
        both.require(other.sign(key.sign(MANIFEST)))
        assert reason(TrustedKeys((other.public,)), key.sign(MANIFEST)) == "unknown-key"

    def test_an_unsigned_manifest_is_refused(self, key: SigningKey) -> None:
        assert reason(TrustedKeys((key.public,)), MANIFEST) == "unsigned"

    def test_a_signature_under_a_borrowed_key_id_is_refused(self, key: SigningKey, other: SigningKey) -> None:
        forged = str(other.sign(MANIFEST).signature).replace(other.public.key_id, key.public.key_id)
        assert reason(TrustedKeys((key.public,)), dataclasses.replace(MANIFEST, signature=forged)) == "bad-signature"

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda text: "x",
            lambda text: text[:-1],
            lambda text: text + "=",
            lambda text: text.upper(),
            lambda text: text.replace("ed25519", "ed448"),
            lambda text: text.replace("ed25519:", "none:"),
            lambda text: text.rpartition(":")[0] + ":" + base64.b64encode(bytes(64)).decode(),
            lambda text: text.rpartition(":")[0] + ":" + "A" * 85 + "B==",  # bits behind the last byte
            lambda text: f"{text},{text}",
        ],
        ids=range(9),
    )
    def test_spoilt_signatures_are_refused(self, key: SigningKey, spoil: Any) -> None:
        spoilt = dataclasses.replace(MANIFEST, signature=spoil(str(key.sign(MANIFEST).signature)))
        assert reason(TrustedKeys((key.public,)), spoilt) == "bad-signature"


class TestStores:
    @pytest.fixture(params=["memory", "disk"])
    def store(self, request: pytest.FixtureRequest, tmp_path: Path) -> KernelStore:
        return MemoryStore() if request.param == "memory" else DiskStore(tmp_path / "cache")

    def test_a_record_gets_its_signature_and_a_new_one(
        self, store: KernelStore, key: SigningKey, other: SigningKey
    ) -> None:
        store.publish(ARTIFACT)
        assert list(store.list()) == [MANIFEST]
        for signer in (key, other):
            signed = signer.sign_artifact(ARTIFACT)
            store.publish(signed)
            assert store.get(ARTIFACT.key) == signed
            assert list(store.list()) == [signed.manifest]
        store.publish(ARTIFACT)
        assert store.get(ARTIFACT.key) == other.sign_artifact(ARTIFACT)
        assert (store.stats().entries, store.stats().damaged, store.stats().differing) == (1, 0, 0)

    def test_another_cubin_never_comes_in_by_its_signature(self, store: KernelStore, key: SigningKey) -> None:
        from cache.samples import synthetic_cubin

        store.publish(ARTIFACT)
        store.publish(key.sign_artifact(make_artifact(cubin=synthetic_cubin(text=b"another"))))
        assert store.get(ARTIFACT.key) == ARTIFACT
        assert store.stats().differing == 1


def test_a_new_signature_shows_in_a_list_that_was_made_before(
    tmp_path: Path, key: SigningKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "_SETTLED_NS", -1)  # an index takes a shelf's word at once, as it does of an old one
    store = DiskStore(tmp_path / "cache")
    store.publish(ARTIFACT)
    assert list(store.list()) == [MANIFEST]
    DiskStore(store.root).publish(key.sign_artifact(ARTIFACT))
    assert list(store.list()) == [key.sign(MANIFEST)]
    assert list((store.root / "tmp").iterdir()) == []


def test_whoever_reads_while_records_are_signed_anew_finds_them_whole(
    tmp_path: Path, key: SigningKey, other: SigningKey
) -> None:
    store = DiskStore(tmp_path / "cache")
    signed = [signer.sign_artifact(ARTIFACT) for signer in (key, other)]
    store.publish(signed[0])
    done = threading.Event()

    def sign() -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(done.set)
            writer = DiskStore(store.root)
            for number in range(1, 61):
                writer.publish(signed[number % 2])

    with ThreadPoolExecutor(1) as pool:
        signing = pool.submit(sign)
        reads = 0
        while not done.is_set() or not reads:
            assert store.get(ARTIFACT.key) in signed
            reads += 1
        signing.result()
    assert (store.stats().damaged, store.stats().misses) == (0, 0)


class TestKeyFiles:
    def test_a_new_key_is_private_and_never_overwritten(self, tmp_path: Path) -> None:
        path = tmp_path / "key.pem"
        old = os.umask(0)
        try:
            made = generate_key(path)
        finally:
            os.umask(old)
        assert path.stat().st_mode & 0o777 == 0o600
        assert read_signing_key(path).public == made.public
        with pytest.raises(FileExistsError):
            generate_key(path)

    def test_a_key_is_never_printed_or_pickled(self, key: SigningKey) -> None:
        assert repr(key) == f"SigningKey({key.public.key_id})"
        with pytest.raises(TypeError):
            pickle.dumps(key)

    @pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644, 0o660])
    def test_a_key_that_others_may_read_is_refused(self, tmp_path: Path, mode: int) -> None:
        path = tmp_path / "key.pem"
        generate_key(path)
        path.chmod(mode)
        with pytest.raises(SigningError, match=f"{mode:04o}.*chmod 600"):
            read_signing_key(path)

    def test_one_behind_a_link_is_taken(self, tmp_path: Path) -> None:
        made = generate_key(tmp_path / "key.pem")
        (tmp_path / "link").symlink_to("key.pem")
        assert read_signing_key(tmp_path / "link").public == made.public

    def test_what_is_no_private_key_is_refused(self, tmp_path: Path) -> None:
        from cryptography.hazmat.primitives.asymmetric import ec, ed25519
        from cryptography.hazmat.primitives.serialization import (
            BestAvailableEncryption,
            Encoding,
            NoEncryption,
            PrivateFormat,
        )

        curve = ec.generate_private_key(ec.SECP256R1())
        locked = ed25519.Ed25519PrivateKey.generate()
        contents = [
            b"",
            b"\xff" * 64,
            b"\n".join(b"-----%s %s-----" % (word, b"PRIVATE KEY") for word in (b"BEGIN", b"END")),
            curve.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
            locked.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"word")),
            b" " * 2**17,
        ]
        path = tmp_path / "key.pem"
        for content in contents:
            path.write_bytes(content)
            path.chmod(0o600)
            with pytest.raises(SigningError):
                read_signing_key(path)
        os.mkfifo(tmp_path / "fifo", 0o600)
        for place in (tmp_path, tmp_path / "none", tmp_path / "fifo", "a\0b"):
            with pytest.raises(SigningError):
                read_signing_key(place)

    def test_lists_of_public_keys(self, tmp_path: Path, key: SigningKey, other: SigningKey) -> None:
        path = tmp_path / "trusted"
        path.write_text(f"# of 2026\n{key.public.text}\n\n  {other.public.text}  # the next one\n")
        path.chmod(0o644)
        assert read_public_keys(path) == [key.public, other.public]
        path.chmod(0o664)
        with pytest.raises(SigningError, match="writable by others"):
            read_public_keys(path)


class TestConfiguration:
    def test_keys_and_files_together(self, tmp_path: Path, key: SigningKey, other: SigningKey) -> None:
        path = tmp_path / "trusted"
        path.write_text(f"{other.public.text}\n")
        path.chmod(0o644)
        trusted = TrustedKeys.parse(f"{key.public.text},{path} {key.public.text}")
        assert trusted == TrustedKeys((key.public, other.public)) == TrustedKeys.parse([key.public.text, path])
        assert pickle.loads(pickle.dumps(trusted)) == trusted

    def test_unset_is_none(self) -> None:
        assert TrustedKeys.from_environment({}) is None

    @pytest.mark.parametrize(
        "text",
        [
            "",
            " ",
            ",",
            "\n",
            "ed25519:",
            "ed25519:AAAA",
            "ed25519:" + "A" * 43 + "=",  # zeros: anybody can sign under it
            "ed25519:" + base64.b64encode(b"\x01" + bytes(31)).decode(),
            "ed25519:" + base64.b64encode(bytes(31) + b"\x80").decode(),
            "ED25519:" + base64.b64encode(bytes(range(32))).decode(),
            "ed25519:" + base64.b64encode(bytes(range(32))).decode().replace("=", ""),
            "rsa:AAAA",
            "secret-word",
            "/nonexistent/keys",
            "/dev/null",
        ],
    )
    def test_nothing_malformed_means_no_keys(self, text: str) -> None:
        with pytest.raises(SigningError) as caught:
            TrustedKeys.from_environment({"MLAPREP_TRUSTED_KEYS": text})
        assert "secret-word" not in str(caught.value)

    def test_one_bad_entry_spoils_the_list(self, key: SigningKey) -> None:
        with pytest.raises(SigningError, match="entry 2"):
            TrustedKeys.parse([key.public.text, ""])
        with pytest.raises(SigningError, match="entry 1"):
            TrustedKeys.parse([3])  # type: ignore[list-item]

    def test_an_empty_list_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "empty").write_text("# nothing yet\n")
        (tmp_path / "empty").chmod(0o644)
        for entries in ([], (), [tmp_path / "empty"]):
            with pytest.raises(SigningError, match=r"no key|without a key"):
                TrustedKeys.parse(entries)


def test_cryptography_is_loaded_when_a_signature_is_checked_and_no_sooner(key: SigningKey) -> None:
    script = f"""
import sys
from mlaprep.clients import KernelClient
from mlaprep.kernels_cache.trust import TrustedKeys
KernelClient("http://kernels.test", trusted_keys={key.public.text!r})
assert "cryptography" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_without_cryptography_pinning_is_an_error_and_nothing_else_is(
    key: SigningKey, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlaprep.kernels_cache.signing.importlib.util.find_spec", lambda name: None)
    for call in (
        lambda: TrustedKeys.parse(key.public.text),
        lambda: read_signing_key(folder / "one.pem"),
        lambda: generate_key(folder / "three.pem"),
    ):
        with pytest.raises(SigningError, match=r"install mlaprep\[signing\]"):
            call()
    assert TrustedKeys.from_environment({}) is None
