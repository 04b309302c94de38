"""Bundles: the same kernels make the same bytes, all of it is proved, and an archive can only hold kernels."""

import dataclasses
import gzip
import hashlib
import io
import os
import pickle
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cache.samples import make_artifact, numbered, synthetic_cubin
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlaprep.kernels_cache import bundle_layout as layout
from mlaprep.kernels_cache.bundle import NO_TIME, Bundle, as_bundled, write_bundle
from mlaprep.kernels_cache.bundle_layout import BLOCK, Record
from mlaprep.kernels_cache.errors import ArtifactError, BundleError
from mlaprep.kernels_cache.key_files import generate_key

KERNELS = [numbered(1), numbered(2, arch="sm_100a"), numbered(3)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kernels.tar"


@pytest.fixture
def good(path: Path) -> bytes:
    write_bundle(path, KERNELS)
    return path.read_bytes()


def problems(path: Path) -> list[str]:
    """What is wrong with a bundle, by member or as a whole."""
    try:
        return [finding.member for finding in Bundle.open(path).verify() if finding.damage]
    except BundleError as error:
        return [error.member or "whole"]


class TestRoundTrip:
    def test_every_kernel_comes_back(self, path: Path, good: bytes) -> None:
        bundle = Bundle.open(path, private=True)
        assert {record.key: bundle.read(record.key) for record in bundle.records} == {k.key: k for k in KERNELS}
        assert [finding.damage for finding in bundle.verify()] == ["", "", ""]
        assert list(bundle.manifests()) == [finding.manifest for finding in bundle.verify()]
        variant = KERNELS[0].manifest.variant_id
        assert bundle.keys(variant, "sm_100a") == [KERNELS[1].key]
        assert set(bundle.keys(variant, "sm_90a")) == {KERNELS[0].key, KERNELS[2].key}
        assert bundle.keys(variant, "sm_120a") == []

    def test_other_programs_read_it(self, path: Path, good: bytes, tmp_path: Path) -> None:
        listed = subprocess.run(["tar", "-tvf", path], capture_output=True, text=True, check=True).stdout
        assert len(listed.splitlines()) == 1 + 3 * len(KERNELS)
        with tarfile.open(path) as archive:
            members = archive.getmembers()
            names = [member.name for member in members]
            assert names == sorted(names)
            assert {(m.mtime, m.uid, m.gid, m.mode, m.uname) for m in members} == {(0, 0, 0, 0o644, "")}
            archive.extractall(tmp_path / "out", filter="data")
        folder = tmp_path / "out" / "kernels" / "sm_100a" / KERNELS[1].key
        assert (folder / "kernel.cubin").read_bytes() == KERNELS[1].cubin

    def test_it_carries_what_the_library_would_write(self, path: Path, good: bytes) -> None:
        """The headers are made by hand, for the same bytes under every Python."""
        stream = io.BytesIO()
        with tarfile.open(path) as archive, tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as copy:
            for member in archive:
                clean = tarfile.TarInfo(member.name)
                clean.size = member.size
                copy.addfile(clean, archive.extractfile(member))
        assert len(stream.getvalue()) == len(good)
        stream.seek(0)
        with tarfile.open(fileobj=io.BytesIO(good)) as ours, tarfile.open(fileobj=stream) as theirs:
            for one, other in zip(ours, theirs, strict=True):
                assert one.get_info() == other.get_info()

    def test_a_bundle_survives_pickling_and_a_fork(self, path: Path, good: bytes) -> None:
        bundle = Bundle.open(path)
        assert pickle.loads(pickle.dumps(bundle)).read(KERNELS[0].key) == KERNELS[0]
        child = os.fork()
        if child == 0:
            os._exit(0 if bundle.read(KERNELS[0].key) == KERNELS[0] else 1)
        assert os.waitpid(child, 0)[1] == 0


class TestReproducible:
    def test_order_and_place_do_not_show(self, tmp_path: Path) -> None:
        (tmp_path / "elsewhere").mkdir()
        one, two = tmp_path / "one.tar", tmp_path / "elsewhere" / "two.tar"
        digest = write_bundle(one, KERNELS)
        assert digest == write_bundle(two, [*reversed(KERNELS), KERNELS[0]])
        assert one.read_bytes() == two.read_bytes()
        assert hashlib.sha256(one.read_bytes()).hexdigest() == digest

    def test_when_and_how_long_it_was_compiled_does_not_show(self, tmp_path: Path) -> None:
        runs = [
            [as_bundled(numbered(1, created_at=created, compile_ms=ms))]
            for created, ms in (("2026-01-31T12:00:00Z", 48.5), ("2026-02-28T12:00:00Z", 51.0))
        ]
        assert len({write_bundle(tmp_path / "kernels.tar", run) for run in runs}) == 1
        assert runs[0][0].manifest.created_at == NO_TIME
        assert runs[0][0].key == numbered(1).key

    def test_a_signature_that_is_there_is_kept_with_all_that_it_covers(self, tmp_path: Path) -> None:
        key, other = generate_key(tmp_path / "one"), generate_key(tmp_path / "two")
        signed = key.sign_artifact(KERNELS[0])
        assert as_bundled(signed) == signed
        again = as_bundled(signed, other)
        assert again == as_bundled(KERNELS[0], other)
        assert again.manifest.created_at == NO_TIME
        assert again.manifest.signature == other.sign(again.manifest).signature

    def test_another_python_writes_the_same(self, path: Path, good: bytes, tmp_path: Path) -> None:
        script = f"""
import os; os.umask(0o077)
from pathlib import Path
from cache.test_bundle import KERNELS
from mlaprep.kernels_cache.bundle import write_bundle
print(write_bundle(Path({str(tmp_path / "other.tar")!r}), KERNELS))
"""
        environ = os.environ | {"PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo", "SOURCE_DATE_EPOCH": "1"}
        environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent.parent), environ.get("PYTHONPATH", "")])
        done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=False)
        assert done.stdout.strip() == hashlib.sha256(good).hexdigest(), done.stderr


class TestWriting:
    def test_nothing_bad_is_bundled_and_what_was_there_stays(self, path: Path, good: bytes) -> None:
        wrong = dataclasses.replace(KERNELS[0], cubin=KERNELS[1].cubin)
        for kernels, error in (([], BundleError), ([wrong], ArtifactError)):
            with pytest.raises(error):
                write_bundle(path, kernels)
        two = make_artifact("// kernel 000001\n", cubin=synthetic_cubin(text=b"another"))
        with pytest.raises(BundleError, match="one key"):
            write_bundle(path, [KERNELS[0], two])
        assert path.read_bytes() == good
        assert [entry.name for entry in path.parent.iterdir()] == [path.name]

    def test_a_disk_that_fails_leaves_what_was_there(
        self, path: Path, good: bytes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="space"):
            write_bundle(path, KERNELS[:1])
        assert path.read_bytes() == good
        assert [entry.name for entry in path.parent.iterdir()] == [path.name]


class TestDamage:
    @settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def test_every_flipped_bit_shows(self, path: Path, data: st.DataObject) -> None:
        if not path.exists():
            write_bundle(path.with_suffix(".good"), KERNELS)
        content = bytearray(path.with_suffix(".good").read_bytes())
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(content)
        assert problems(path) != []

    @pytest.mark.parametrize("cut", [1, BLOCK, 10240, 0.5, 1.0])
    def test_cut_short(self, path: Path, good: bytes, cut: float) -> None:
        path.write_bytes(good[: -int(cut * len(good)) if isinstance(cut, float) else -cut])
        with pytest.raises(BundleError):
            Bundle.open(path)

    @pytest.mark.parametrize("more", [b"\0" * BLOCK, b"\0" * 10240, b"x"])
    def test_something_behind_the_end(self, path: Path, good: bytes, more: bytes) -> None:
        path.write_bytes(good + more)
        with pytest.raises(BundleError, match="behind its end"):
            Bundle.open(path)

    def test_the_member_at_fault_is_named_and_the_others_are_read(self, path: Path, good: bytes) -> None:
        place = good.index(KERNELS[2].cubin)
        path.write_bytes(good[: place + 70] + b"?" + good[place + 71 :])
        member = f"kernels/sm_90a/{KERNELS[2].key}/kernel.cubin"
        assert problems(path) == [member]
        bundle = Bundle.open(path)
        with pytest.raises(BundleError, match=r"cubin .*sha256") as caught:
            bundle.read(KERNELS[2].key)
        assert caught.value.member == member
        assert str(path) in str(caught.value)
        assert bundle.read(KERNELS[0].key) == KERNELS[0]

    def test_a_kernel_in_the_place_of_another(self, path: Path) -> None:
        """Every part whole, the index and the manifests swapped."""
        one, two = KERNELS[0], KERNELS[2]
        records = [Record.of(one), dataclasses.replace(Record.of(two), key=one.key[:-1] + two.key[-1:])]
        write_raw(path, records, [one, two])
        assert len(problems(path)) == 1

    def test_a_file_that_was_replaced_meanwhile(self, path: Path, good: bytes) -> None:
        bundle = Bundle.open(path)
        other = path.with_name("other")
        write_bundle(other, KERNELS[:1])
        other.replace(path)
        with pytest.raises(BundleError, match="replaced"):
            bundle.read(KERNELS[0].key)

    def test_what_others_may_write_is_not_read_from(self, path: Path, good: bytes) -> None:
        path.chmod(0o664)
        with pytest.raises(BundleError, match=r"0664.*go-w"):
            Bundle.open(path, private=True)
        assert Bundle.open(path)


def write_raw(path: Path, records: list[Record], kernels: list[Any]) -> None:
    """An archive with these records in its index, whatever the kernels are."""
    pairs = sorted(zip(records, kernels, strict=True), key=lambda pair: pair[0])
    index = layout.index_text([record for record, _ in pairs])
    parts = [layout.header(layout.INDEX, len(index)), index, bytes(layout.padded(len(index)) - len(index))]
    for record, kernel in pairs:
        contents = (kernel.source.encode(), kernel.cubin, kernel.manifest.to_json().encode())
        for (name, _), content in zip(record.members(), contents, strict=True):
            parts += [layout.header(name, len(content)), content, bytes(layout.padded(len(content)) - len(content))]
    body = b"".join(parts)
    path.write_bytes(body.ljust(layout.whole_size(len(index), [record for record, _ in pairs]), b"\0"))


def tar_of(*members: tarfile.TarInfo, format: int = tarfile.PAX_FORMAT) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=format) as archive:
        for member in members:
            archive.addfile(member, io.BytesIO(bytes(member.size)) if member.isreg() else None)
    return stream.getvalue()


def info(name: str, kind: bytes = tarfile.REGTYPE, size: int = 0, **more: Any) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.size = kind, size
    for field, value in more.items():
        setattr(member, field, value)
    return member


MEMBER = f"kernels/sm_90a/{KERNELS[0].key}/kernel.cubin"
STRANGE: dict[str, tuple[tarfile.TarInfo, str]] = {
    "absolute": (info("/etc/passwd"), "another name"),
    "parent": (info("../../escape"), "another name"),
    "parent-inside": (info("kernels/../../escape"), "another name"),
    "symlink": (info(MEMBER, tarfile.SYMTYPE, linkname="/etc/passwd"), "a symbolic link"),
    "hard-link": (info(MEMBER, tarfile.LNKTYPE, linkname="bundle.json"), "a hard link"),
    "device": (info(MEMBER, tarfile.CHRTYPE, devmajor=1, devminor=5), "a device"),
    "block-device": (info(MEMBER, tarfile.BLKTYPE, devmajor=8), "a device"),
    "fifo": (info(MEMBER, tarfile.FIFOTYPE), "a FIFO"),
    "directory": (info(MEMBER, tarfile.DIRTYPE), "a directory"),
    "sparse": (info(MEMBER, tarfile.GNUTYPE_SPARSE), "a sparse file"),
    "long-name": (info(MEMBER, tarfile.GNUTYPE_LONGNAME), "an extended header"),
    "pax": (info(MEMBER, tarfile.XHDTYPE), "an extended header"),
    "set-user-id": (info(MEMBER, size=len(KERNELS[0].cubin), mode=0o4755), "than mlaprep writes"),
    "owner": (info(MEMBER, size=len(KERNELS[0].cubin), mode=0o644, uid=1000), "than mlaprep writes"),
    "time": (info(MEMBER, size=len(KERNELS[0].cubin), mode=0o644, mtime=1), "than mlaprep writes"),
    "size": (info(MEMBER, size=2**33 - 1, mode=0o644), "than mlaprep writes"),
    "base-256-size": (info(MEMBER, size=2**62, mode=0o644), "than mlaprep writes"),
}


@pytest.mark.parametrize("kind", STRANGE)
class TestHostileMembers:
    def test_in_the_place_of_a_cubin(self, path: Path, good: bytes, kind: str) -> None:
        member, told = STRANGE[kind]
        header = member.tobuf(tarfile.GNU_FORMAT)[-BLOCK:]
        place = good.index(MEMBER.encode() + b"\0")
        path.write_bytes(good[:place] + header + good[place + BLOCK :])
        bundle = Bundle.open(path)
        with pytest.raises(BundleError, match=told) as caught:
            bundle.read(KERNELS[0].key)
        assert caught.value.member == MEMBER
        assert problems(path) == [MEMBER]

    def test_in_the_place_of_the_index(self, path: Path, kind: str) -> None:
        header = STRANGE[kind][0].tobuf(tarfile.GNU_FORMAT)
        path.write_bytes(header + bytes(20480))
        with pytest.raises(BundleError):
            Bundle.open(path)


class TestHostileFiles:
    @pytest.mark.parametrize(
        "make",
        [
            lambda good: b"",
            lambda good: b"x",
            lambda good: bytes(10240),
            lambda good: b"\xff" * 10240,
            lambda good: gzip.compress(good),
            lambda good: good[BLOCK:],
            lambda good: tar_of(info("bundle.json", size=100)),
            lambda good: tar_of(info("bundle.json", size=0)),
            lambda good: tar_of(info("a" * 200, size=10)),
            lambda good: b"PK\x03\x04" + bytes(1020),
            lambda good: layout.header(layout.INDEX, 8**11 - 1) + bytes(10240),
            lambda good: layout.header(layout.INDEX, layout.MAX_INDEX_BYTES + 1) + bytes(10240),
        ],
        ids=range(12),
    )
    def test_no_bundle(self, path: Path, good: bytes, make: Callable[[bytes], bytes]) -> None:
        path.write_bytes(make(good))
        with pytest.raises(BundleError) as caught:
            Bundle.open(path)
        assert str(path) in str(caught.value)

    def test_the_headers_are_as_the_library_makes_them(self) -> None:
        """Or the two above would be refused for another reason than their size."""
        assert tarfile.TarInfo.frombuf(layout.header("bundle.json", 8**11 - 1), "ascii", "strict").size == 8**11 - 1

    def test_what_is_no_file(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "fifo")
        for place in (tmp_path, tmp_path / "none", tmp_path / "fifo", Path("/dev/zero")):
            with pytest.raises(BundleError, match=str(place)):
                Bundle.open(place)

    def test_a_sparse_file_of_terabytes_costs_nothing(self, path: Path, good: bytes) -> None:
        with path.open("r+b") as file:
            file.truncate(2**41)
        with pytest.raises(BundleError, match="more than"):
            Bundle.open(path)

    def test_a_million_members_are_refused_by_the_index(self, path: Path) -> None:
        record = Record.of(KERNELS[0])
        many = [dataclasses.replace(record, key=f"{number:064x}") for number in range(layout.MAX_KERNELS + 1)]
        index = layout.index_text(many)
        with pytest.raises(BundleError, match="more than"):
            layout.parse_index(index)
        path.write_bytes(layout.header(layout.INDEX, len(index)) + index.ljust(layout.padded(len(index)), b"\0"))
        with pytest.raises(BundleError):
            Bundle.open(path)

    def test_members_without_end_behind_a_good_index(self, path: Path, good: bytes) -> None:
        path.write_bytes(good[:-1024] + layout.header("kernels/more", 0) * 20_000 + bytes(1024))
        with pytest.raises(BundleError, match="behind its end"):
            Bundle.open(path)

    def test_the_largest_index_fits_its_bound(self) -> None:
        record = dataclasses.replace(
            Record.of(KERNELS[0]), arch="sm_100a", variant_id="m" * layout._MAX_NAME, cubin_size=16 * 2**20
        )
        many = [dataclasses.replace(record, key=f"{number:064x}") for number in range(layout.MAX_KERNELS)]
        assert len(layout.index_text(many)) <= layout.MAX_INDEX_BYTES
        assert len(layout.parse_index(layout.index_text(many))) == layout.MAX_KERNELS


def changed(**changes: Any) -> bytes:
    record = Record.of(KERNELS[0]).document() | changes
    return layout.canonical_json({"format": layout.FORMAT, "version": layout.VERSION, "kernels": [record]}).encode()


RECORD = Record.of(KERNELS[0])


@pytest.mark.parametrize(
    "index",
    [
        b"",
        b"null",
        b"[" * 100_000,
        b'{"format":"mlaprep-bundle"}',
        layout.index_text([]),
        layout.index_text([RECORD, RECORD]),
        layout.index_text([RECORD, dataclasses.replace(RECORD, arch="sm_100a")]),
        layout.index_text([RECORD]) + b" ",
        layout.index_text([RECORD]).replace(b'"version":1', b'"version":2'),
        layout.index_text([RECORD]).replace(b'"version":1', b'"version":true'),
        layout.index_text([RECORD]).replace(b'"version":1', b'"version":1.0'),
        layout.index_text([RECORD]).replace(b"mlaprep-bundle", b"other-bundle"),
        changed(arch="../../etc"),
        changed(arch="sm_90a/.."),
        changed(key="../" * 20),
        changed(key="A" * 64),
        changed(key=None),
        changed(cubin_size=0),
        changed(cubin_size=-1),
        changed(cubin_size=2**40),
        changed(cubin_size=True),
        changed(cubin_size=1.0),
        changed(source_size=2**40),
        changed(manifest_size=2**40),
        changed(variant_id=""),
        changed(variant_id="x" * 10_000),
        changed(extra=1),
    ],
    ids=range(27),
)
def test_an_index_that_is_not_as_it_is_written(index: bytes) -> None:
    with pytest.raises(BundleError) as caught:
        layout.parse_index(index)
    assert caught.value.member == layout.INDEX


@given(st.binary(max_size=300))
def test_any_bytes_are_refused_with_our_error(content: bytes) -> None:
    with pytest.raises(BundleError):
        layout.parse_index(content)
    with pytest.raises(BundleError):
        layout.require_header(content, "bundle.json", 10)
