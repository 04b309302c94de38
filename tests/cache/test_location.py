"""Where the default store is, and what stands in for it."""

import logging
import os
import pwd
from pathlib import Path

import pytest
from cache.samples import make_artifact

from mlaprep.kernels_cache.disk import DISK_BYTES, DiskStore
from mlaprep.kernels_cache.errors import StoreError
from mlaprep.kernels_cache.location import cache_dir, default_cache_dir
from mlaprep.kernels_cache.opening import open_default_store
from mlaprep.kernels_cache.store import MemoryStore, TieredStore

ARTIFACT = make_artifact()


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({"MLAPREP_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a"),
        ({"MLAPREP_CACHE_DIR": "~/a", "HOME": "/c"}, "/c/a"),
        ({"MLAPREP_CACHE_DIR": "~", "HOME": "/c"}, "/c"),
        ({"MLAPREP_CACHE_DIR": "", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/mlaprep"),
        ({"XDG_CACHE_HOME": "b", "HOME": "/c"}, "/c/.cache/mlaprep"),
        ({"XDG_CACHE_HOME": "", "HOME": "/c"}, "/c/.cache/mlaprep"),
        ({"HOME": "/c"}, "/c/.cache/mlaprep"),
    ],
)
def test_the_place(environ: dict[str, str], place: str) -> None:
    assert default_cache_dir(environ) == Path(place)


@pytest.mark.parametrize(
    ("given", "place"),
    [("/a", "/a"), (Path("/a"), "/a"), ("~/a", "/h/a"), (Path("~/a"), "/h/a"), ("", "/b"), (None, "/b")],
)
def test_a_place_that_is_given_is_read_like_the_variable(given: str | Path | None, place: str) -> None:
    assert cache_dir(given, {"MLAPREP_CACHE_DIR": "/b", "HOME": "/h"}) == Path(place)


def test_the_home_of_another_user_is_not_guessed() -> None:
    for given in ("~root/cache", "~x"):
        with pytest.raises(StoreError, match="another user"):
            cache_dir(given, {"HOME": "/h"})


def test_a_relative_place_is_below_the_current_directory() -> None:
    assert default_cache_dir({"MLAPREP_CACHE_DIR": "here"}) == Path.cwd() / "here"


@pytest.mark.parametrize("home", [None, ""])
def test_without_a_home_in_the_environment_the_user_database_names_it(
    home: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Path(pwd.getpwuid(os.getuid()).pw_dir) / ".cache" / "mlaprep"
    monkeypatch.setenv("HOME", "")
    assert default_cache_dir({} if home is None else {"HOME": home}) == place


def test_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(_: int) -> None:
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    with pytest.raises(StoreError, match="MLAPREP_CACHE_DIR"):
        default_cache_dir({})
    assert isinstance(open_default_store({}), MemoryStore)


def test_the_default_is_the_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = open_default_store({"XDG_CACHE_HOME": str(tmp_path)})
    assert isinstance(store, DiskStore)
    assert (store.root, store.max_bytes) == (tmp_path / "mlaprep", DISK_BYTES)
    assert caplog.records == []


def test_the_environment_of_the_process_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLAPREP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("MLAPREP_CACHE_MAX_BYTES", "4096")
    store = open_default_store()
    assert isinstance(store, DiskStore)
    assert (store.root, store.max_bytes) == (tmp_path / "cache", 4096)


@pytest.mark.parametrize("kind", ["file", "mode", "owner", "size"])
def test_memory_and_one_warning_where_no_disk_can_be_used(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "cache"
    environ = {"MLAPREP_CACHE_DIR": str(place)}
    if kind == "file":
        place.write_text("")
    elif kind == "mode":
        place.mkdir()
        place.chmod(0o777)
    elif kind == "owner":
        place.mkdir()
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    else:
        environ["MLAPREP_CACHE_MAX_BYTES"] = "1 GB"
    store = open_default_store(environ)
    assert isinstance(store, MemoryStore)
    store.publish(ARTIFACT)
    assert store.get(ARTIFACT.key) == ARTIFACT
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert str(place) in caplog.text or kind == "size"


def test_memory_stands_before_a_disk_that_can_only_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    DiskStore(tmp_path / "cache").publish(ARTIFACT)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    store = open_default_store({"MLAPREP_CACHE_DIR": str(tmp_path / "cache")})
    assert isinstance(store, TieredStore)
    assert store.get(ARTIFACT.key) == ARTIFACT
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
