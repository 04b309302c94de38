"""The command line: pure JSON on stdout, exit codes, errors by field, no tracebacks."""

import hashlib
import importlib.metadata
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_service import artifact_of
from typer.testing import CliRunner, Result

from mlaprep.clients.cli import _reachable, app
from mlaprep.clients.client import KernelClient
from mlaprep.kernels_cache.artifact import Manifest
from mlaprep.kernels_cache.disk import DISK_BYTES, DiskStore
from mlaprep.kernels_cache.elf import check_cubin
from mlaprep.service.settings import Settings
from mlaprep.service.state import open_store as open_service_store
from mlaprep.templates.render import render
from mlaprep.templates.spec import KernelSpec

VARIANT = KernelSpec(num_heads=12).variant_id
LATER = "2026-02-28T12:00:00Z"
KIMI = ["--preset", "kimi-k3", "--tp", "8"]
Run = Callable[..., Result]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def run(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command in this process, over a cache of its own."""
    monkeypatch.setenv("MLAPREP_CACHE_DIR", str(cache))
    monkeypatch.setenv("COLUMNS", "80")

    def invoke(*arguments: str, exit_code: int = 0, stdin: str | None = None) -> Result:
        result = CliRunner().invoke(app, list(arguments), input=stdin)
        assert result.exit_code == exit_code, (result.output, result.exception)
        assert "Traceback" not in result.output
        return result

    return invoke


@pytest.fixture
def filled(cache: Path) -> DiskStore:
    """Two variants, one of them for two architectures."""
    store = DiskStore(cache)
    for spec, arch in ((KernelSpec(num_heads=12), "sm_90a"), (KernelSpec(num_heads=12), "sm_100a")):
        store.publish(artifact_of(spec, arch))
    store.publish(artifact_of(KernelSpec(num_heads=16), "sm_90a"))
    return store


class TestCompile:
    def test_blackwell_without_a_gpu(self, run: Run, cache: Path) -> None:
        archs = ("sm_100a", "sm_103a", "sm_120a")
        command = ["compile", *KIMI, *(word for arch in archs for word in ("--arch", arch)), "--json"]
        result = run(*command)
        document = json.loads(result.stdout)
        assert document["compiles"] == 3
        assert [kernel["arch"] for kernel in document["kernels"]] == list(archs)
        assert len({kernel["cubin_sha256"] for kernel in document["kernels"]}) == 3
        for kernel in document["kernels"]:
            assert kernel["variant_id"] == VARIANT
            assert not kernel["cached"]
            assert (kernel["spill_stores"], kernel["spill_loads"], kernel["stack_bytes"]) == (0, 0, 0)
            members = {name: value for name, value in kernel.items() if name not in ("cached", "tier")}
            artifact = DiskStore(cache).get(Manifest.from_dict(members).key)
            assert artifact is not None
            check_cubin(artifact.cubin, kernel["arch"])
        again = json.loads(run(*command).stdout)
        assert again["compiles"] == 0
        assert all(kernel["cached"] for kernel in again["kernels"])

    def test_people_get_a_table_that_fits_80_columns(self, run: Run) -> None:
        result = run("compile", *KIMI, "--arch", "sm_90a")
        assert "h12-r512-d64-bf16-fp8-norope-i64-pdl  sm_90a" in result.stdout
        assert max(map(len, result.stdout.splitlines())) <= 80
        assert "[1/1]" in result.stderr

    def test_takes_variants_and_specs_from_files_and_stdin(self, run: Run, tmp_path: Path) -> None:
        document = tmp_path / "spec.json"
        document.write_text(json.dumps({"num_heads": 3, "pdl": False}))
        options = ["--arch", "sm_90a", "--json"]
        result = json.loads(run("compile", "--variant", VARIANT, "--spec", str(document), *options).stdout)
        assert [kernel["spec"]["num_heads"] for kernel in result["kernels"]] == [12, 3]
        piped = run("compile", "--spec", "-", *options, stdin=json.dumps([{"num_heads": 3, "pdl": False}]))
        assert json.loads(piped.stdout)["compiles"] == 0

    def test_set_overrides_a_presets_fields(self, run: Run) -> None:
        options = ["--set", "pdl=false", "--set", "loc_dtype=i32", "--arch", "sm_89", "--json"]
        (kernel,) = json.loads(run("compile", *KIMI, *options).stdout)["kernels"]
        assert (kernel["spec"]["pdl"], kernel["spec"]["loc_dtype"], kernel["arch"]) == (False, "i32", "sm_89")

    def test_what_succeeds_is_told_beside_what_fails(self, run: Run) -> None:
        result = run("compile", *KIMI, "--arch", "sm_90a", "--arch", "sm_89", "--json", exit_code=2)
        document = json.loads(result.stdout)
        assert [kernel["arch"] for kernel in document["kernels"]] == ["sm_90a"]
        (error,) = document["errors"]
        assert (error["arch"], error["problems"][0]["field"]) == ("sm_89", "pdl")


class TestBadInput:
    @pytest.mark.parametrize(
        ("arguments", "field"),
        [
            (["--preset", "kimi-k9"], "preset"),
            (["--preset", "kimi-k3", "--tp", "3"], "tp"),
            (["--preset", "kimi-k3", "--set", "num_heads=0"], "num_heads"),
            (["--preset", "kimi-k3", "--set", "heads=1"], "heads"),
            (["--preset", "kimi-k3", "--set", "pdl"], "set"),
            (["--preset", "kimi-k3", "--set", "tile_scale=raw"], "tile_scale"),
            (["--variant", "mla_prepare-h12"], "variant_id"),
            ([], "kernels"),
            ([*KIMI, "--arch", "sm_70"], "arch"),
            ([*KIMI, "--arch", "SM_90A"], "arch"),
            ([*KIMI, "--arch", "sm_90a "], "arch"),
        ],
    )
    def test_is_told_by_field(self, run: Run, arguments: list[str], field: str) -> None:
        told = run("compile", *arguments, exit_code=2)
        assert told.stdout == ""
        assert told.stderr.startswith(f"error {field}: found ")
        document = json.loads(run("compile", *arguments, "--json", exit_code=2).stdout)
        assert document["error"]["problems"][0]["field"] == field

    @pytest.mark.parametrize(
        "text",
        ["", "{", "[1]", "null", "12", '{"num_heads": NaN}', '{"num_heads": 1e400}', '{"num_heads": "12"}',
         '{"num_heads": true}', '{"num_heads": 12, "x\\n": 1}', "[" * 100_000, "9" * 5000, "\ud800",
         '{"num_heads": 12, "dtype": "bf16\\n#include \\"/etc/passwd\\""}', '{"num_heads": 12, "dtype": "{{7*7}}"}'],
    )  # fmt: skip
    def test_a_bad_spec_document_is_no_traceback(self, run: Run, tmp_path: Path, text: str) -> None:
        path = tmp_path / "spec.json"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        result = run("compile", "--spec", str(path), "--json", exit_code=2)
        assert json.loads(result.stdout)["error"]["type"] == "SpecError"
        assert "passwd" not in result.output

    @pytest.mark.parametrize(
        "name",
        ["..", "../../etc/passwd", "%2e%2e", "..%2f..%2fetc%2fpasswd", "a%00b", "/etc/passwd", "x" * 5000, "{{7*7}}",
         "0123456789abcdef/..", "g" * 64],
    )  # fmt: skip
    def test_B054_hostile_names_reach_no_path(self, run: Run, filled: DiskStore, name: str) -> None:
        for command in (["show", name], ["render", "--variant", name], ["compile", "--variant", name]):
            told = run(*command, exit_code=2)
            assert name not in told.output

    def test_a_missing_file_is_named(self, run: Run) -> None:
        assert "nowhere.json" in run("compile", "--spec", "nowhere.json", exit_code=1).stderr

    def test_an_unknown_option_is_a_usage_error(self, run: Run) -> None:
        run("compile", "--frobnicate", exit_code=2)

    def test_an_unusable_cache_is_named(self, run: Run, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        told = run("ls", "--cache-dir", str(tmp_path / "file" / "cache"), exit_code=1)
        assert "file" in told.stderr


class TestLookingAround:
    def test_ls(self, run: Run, filled: DiskStore) -> None:
        document = json.loads(run("ls", "--json").stdout)
        assert len(document["kernels"]) == 3
        assert len(json.loads(run("ls", "--arch", "sm_100a", "--json").stdout)["kernels"]) == 1
        table = run("ls").stdout
        assert "3 kernels" in table
        assert max(map(len, table.splitlines())) <= 80

    def test_ls_of_nothing_says_what_to_do(self, run: Run) -> None:
        assert "mlaprep compile" in run("ls").stdout
        assert json.loads(run("ls", "--json").stdout) == {"kernels": []}

    def test_show_by_variant_and_by_digest(self, run: Run, filled: DiskStore) -> None:
        artifact = artifact_of(KernelSpec(num_heads=16), "sm_90a")
        short = artifact.manifest.variant_id.removeprefix("mla_prepare-")
        for name in (artifact.manifest.variant_id, short, artifact.key, artifact.key[:12], artifact.digest[:12]):
            (shown,) = json.loads(run("show", name, "--json").stdout)["kernels"]
            assert shown == artifact.manifest.to_dict() | {"current": True, "damage": None}
        assert artifact.key in run("show", short).stdout

    def test_show_has_every_architecture_of_a_variant(self, run: Run, filled: DiskStore) -> None:
        shown = json.loads(run("show", VARIANT, "--json").stdout)["kernels"]
        assert [kernel["arch"] for kernel in shown] == ["sm_90a", "sm_100a"]
        table = run("show", VARIANT).stdout
        for arch in ("sm_90a", "sm_100a"):
            artifact = artifact_of(KernelSpec(num_heads=12), arch)
            assert artifact.digest in table.replace("\n", "").replace(" ", "")
            assert artifact.key[:8] in table
        assert max(map(len, table.splitlines())) <= 80
        (one,) = json.loads(run("show", VARIANT, "--arch", "sm_100a", "--json").stdout)["kernels"]
        assert one["arch"] == "sm_100a"

    def test_tables_show_no_python(self, run: Run, filled: DiskStore) -> None:
        for options in ([], ["--arch", "sm_100a"]):
            told = run("show", VARIANT, *options).stdout
            assert not re.search(r"\b(None|True|False)\b", told)

    def test_show_refuses_to_guess_between_digits(
        self, run: Run, filled: DiskStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("mlaprep.clients.cli_cache._DIGEST_PREFIX", re.compile("[0-9a-f]?"))
        told = run("show", "", exit_code=2).stderr
        assert told.startswith("error KERNEL: found digits that 3 kernels share")
        assert artifact_of(KernelSpec(num_heads=16)).key[:12] in told

    def test_stale_kernels_are_marked_passed_over_and_removed(self, run: Run, filled: DiskStore) -> None:
        source = render(KernelSpec(num_heads=12)).text
        stale = artifact_of(KernelSpec(num_heads=12), source=source + "// of other templates", created_at=LATER)
        filled.publish(stale)
        listed = {kernel["key"]: kernel["current"] for kernel in json.loads(run("ls", "--json").stdout)["kernels"]}
        assert listed.pop(stale.key) is False
        assert list(listed.values()) == [True] * 3
        table = run("ls").stdout
        assert f"{stale.key[:8]} stale" in table
        assert "gc --stale" in table
        assert max(map(len, table.splitlines())) <= 80
        (shown,) = json.loads(run("show", VARIANT, "--arch", "sm_90a", "--json").stdout)["kernels"]
        assert shown["key"] != stale.key
        (named,) = json.loads(run("show", stale.key[:12], "--json").stdout)["kernels"]
        assert (named["key"], named["current"]) == (stale.key, False)
        assert "no: made by other templates" in run("show", stale.key[:12]).stdout
        document = json.loads(run("gc", "--stale", "--json").stdout)
        assert (document["removed"], document["stale"], document["entries"]) == (1, 1, 3)

    def test_damage_is_told_and_left_as_it_is(self, run: Run, filled: DiskStore) -> None:
        artifact = artifact_of(KernelSpec(num_heads=16), "sm_90a")
        place = filled.root / "sm_90a" / artifact.key[:2] / artifact.key
        (place / "kernel.cubin").write_bytes(b"x" * artifact.manifest.cubin_size)
        assert "damaged" not in run("ls").stdout
        assert f"{artifact.key[:8]} damaged" in run("ls", "--verify", exit_code=1).stdout
        damage = [k["damage"] for k in json.loads(run("ls", "--verify", "--json", exit_code=1).stdout)["kernels"]]
        assert [bool(text) for text in damage].count(True) == 1
        told = run("show", artifact.key, exit_code=1)
        assert "cubin that differs" in told.stderr
        assert "verified" in told.stdout
        (shown,) = json.loads(run("show", artifact.key, "--json", exit_code=1).stdout)["kernels"]
        assert "cubin that differs" in shown["damage"]
        (place / "manifest.json").write_bytes(b"{")
        assert f"damaged sm_90a {artifact.key[:12]}" in run("ls").stdout
        (unreadable,) = json.loads(run("ls", "--json").stdout)["unreadable"]
        assert unreadable["key"] == artifact.key
        assert "unreadable" in run("show", artifact.key, exit_code=3).stderr
        assert place.is_dir()

    @pytest.mark.parametrize("command", [["ls"], ["ls", "--verify"], ["show", VARIANT], ["gc"], ["gc", "--stale"],
                                         ["doctor"]])  # fmt: skip
    def test_looking_makes_no_directory(self, run: Run, cache: Path, command: list[str]) -> None:
        run(*command, exit_code=3 if command[0] == "show" else 0)
        assert not cache.exists()

    @pytest.mark.parametrize("given", ["~/kernels", "option", ""])
    def test_one_place_however_it_is_named(
        self, run: Run, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
    ) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.chdir(tmp_path)
        wanted = {"~/kernels": tmp_path / "kernels", "option": tmp_path / "option", "": cache}[given]
        DiskStore(wanted).publish(artifact_of(KernelSpec(num_heads=12)))
        assert len(json.loads(run("ls", "--cache-dir", given, "--json").stdout)["kernels"]) == 1
        if given:
            monkeypatch.setenv("MLAPREP_CACHE_DIR", given)
        assert len(json.loads(run("ls", "--json").stdout)["kernels"]) == 1
        with KernelClient(on_miss="error", offline=True) as client:
            assert isinstance(client.store, DiskStore)
            assert client.store.root == wanted
        opened = open_service_store(Settings(memory_max_bytes=0))
        assert isinstance(opened.store, DiskStore)
        assert (opened.store.root, opened.warning) == (wanted, "")

    def test_show_of_what_is_not_there(self, run: Run, filled: DiskStore) -> None:
        run("show", "0123456789ab", exit_code=3)
        run("show", KernelSpec(num_heads=1).variant_id, exit_code=3)

    def test_render(self, run: Run, tmp_path: Path) -> None:
        source = render(KernelSpec(num_heads=12))
        assert run("render", *KIMI).stdout == source.text
        assert json.loads(run("render", "--variant", VARIANT, "--json").stdout)["source_sha256"] == source.sha256
        run("render", *KIMI, "--output", str(tmp_path / "kernel.cu"))
        assert (tmp_path / "kernel.cu").read_text() == source.text

    def test_render_wants_one_variant(self, run: Run) -> None:
        assert "--tp" in run("render", "--preset", "kimi-k3", exit_code=2).stderr

    def test_gc_has_the_caches_own_limit(self, run: Run, filled: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
        assert json.loads(run("gc", "--json").stdout)["max_bytes"] == DISK_BYTES
        monkeypatch.setenv("MLAPREP_CACHE_MAX_BYTES", "0")
        document = json.loads(run("gc", "--json").stdout)
        assert (document["removed"], document["max_bytes"]) == (3, 0)

    def test_gc(self, run: Run, filled: DiskStore) -> None:
        assert json.loads(run("gc", "--max-bytes", "1G", "--json").stdout)["removed"] == 0
        document = json.loads(run("gc", "--max-bytes", "0", "--json").stdout)
        assert (document["removed"], document["entries"], document["bytes"]) == (3, 0, 0)

    @pytest.mark.parametrize("size", ["", "-1", "1X", "1.5G", "1e9", "9" * 40])
    def test_gc_refuses_what_is_no_size(self, run: Run, size: str) -> None:
        assert "max-bytes" in run("gc", "--max-bytes", size, exit_code=2).stderr


def test_every_command_has_help_and_json() -> None:
    for command in app.registered_commands:
        name = command.name or command.callback.__name__  # type: ignore[union-attr]
        result = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "100"})
        assert result.exit_code == 0
        assert "--json" in result.output, name


def test_a_reader_that_closes_the_pipe_causes_no_traceback(filled: DiskStore, cache: Path) -> None:
    command = [sys.executable, "-m", "mlaprep.clients.cli", "render", *KIMI]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""


def environment(**changes: str) -> dict[str, str]:
    paths = os.pathsep.join(path for path in sys.path if os.path.isabs(path))
    return os.environ | {"PYTHONPATH": paths} | changes


@contextmanager
def serving(folder: Path, *options: str, **changes: str) -> Iterator[tuple[dict[str, Any], "subprocess.Popen[str]"]]:
    """``mlaprep serve`` on a free port, with what it announced; ended by its pid."""
    command = [sys.executable, "-m", "mlaprep.clients.cli", "serve", "--port", "0", "--json", *options]
    command += ["--cache-dir", str(folder / "served"), "--port-file", str(folder / "port")]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment(**changes))
    try:
        assert process.stdout is not None
        lines = []
        while not lines or lines[-1].rstrip() != "}":
            lines.append(process.stdout.readline())
            assert lines[-1], (folder / "log").read_text()
        yield json.loads("".join(lines)), process
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


class TestServe:
    def test_announces_serves_fetches_and_ends(self, run: Run, tmp_path: Path, cache: Path) -> None:
        with serving(tmp_path) as (announced, process):
            url, pid = announced["url"], announced["pid"]
            assert pid == process.pid
            assert (tmp_path / "port").read_text() == str(announced["port"])
            assert httpx.get(f"{url}/healthz", trust_env=False).status_code == 200
            folder = tmp_path / "out"
            options = ["--url", url, "--arch", "sm_100a", "--json"]
            fetched = json.loads(run("fetch", *KIMI, *options, "--output", str(folder)).stdout)
            (kernel,) = fetched["kernels"]
            assert not kernel["cached"]
            assert fetched["compiles"] == 1
            files = fetched["files"][kernel["key"]]
            cubin = Path(files["cubin"]).read_bytes()
            assert hashlib.sha256(cubin).hexdigest() == kernel["cubin_sha256"]
            check_cubin(cubin, "sm_100a")
            assert Manifest.from_json(Path(files["manifest"]).read_bytes(), sealed=True).key == kernel["key"]
            assert Path(files["source"]).read_text() == render(KernelSpec(num_heads=12)).text
            assert list(DiskStore(cache).list()) == []

            again = json.loads(run("fetch", *KIMI, *options).stdout)
            assert (again["compiles"], again["kernels"][0]["tier"]) == (0, "service")
            assert len(list(DiskStore(cache).list())) == 1
            third = json.loads(run("fetch", *KIMI, *options).stdout)
            assert third["kernels"][0]["tier"] == "disk"

            built = json.loads(run("compile", "--preset", "kimi-k3", "--tp", "4", *options).stdout)
            assert (built["compiles"], built["kernels"][0]["tier"]) == (1, "service")
            assert json.loads(run("doctor", "--url", url, "--json").stdout)["usable"]
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            process.wait(20)
            assert time.monotonic() - began < 10
        told = run("fetch", *KIMI, "--url", url, "--arch", "sm_90a", "--json", exit_code=3)
        assert json.loads(told.stdout)["errors"][0]["type"] == "KernelUnavailable"

    def test_a_token_protects_building_and_is_not_shown(self, run: Run, tmp_path: Path) -> None:
        with serving(tmp_path, MLAPREP_TOKEN="secret-word") as (announced, _):
            options = [*KIMI, "--url", announced["url"], "--arch", "sm_90a"]
            told = run("fetch", *options, exit_code=3)
            assert "MLAPREP_TOKEN" in told.stderr
            built = run("fetch", *options, "--token", "secret-word", "--json")
            assert json.loads(built.stdout)["compiles"] == 1
            # What is built may be read by anybody.
            assert "sm_90a" in run("fetch", *options, "--cache-dir", str(tmp_path / "fresh")).stdout
        assert "secret-word" not in (tmp_path / "log").read_text()

    def test_refuses_to_let_everybody_build(self, run: Run) -> None:
        told = run("serve", "--host", "0.0.0.0", "--port", "0", exit_code=2)
        assert "MLAPREP_TOKEN" in told.stderr

    def test_a_port_in_use_is_a_failure(self, tmp_path: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            command = [sys.executable, "-m", "mlaprep.clients.cli", "serve", "--port", str(taken.getsockname()[1])]
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=60,
                env=environment(MLAPREP_CACHE_DIR=str(tmp_path / "cache")),
            )  # fmt: skip
        assert done.returncode == 1
        assert "Address already in use" in done.stderr
        assert "Traceback" not in done.stderr

    def test_a_port_in_use_is_json_too_and_nothing_was_started(self, run: Run, cache: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            document = json.loads(run("serve", "--port", str(port), "--json", exit_code=1).stdout)
        assert document["error"]["type"] == "ListenError"
        assert str(port) in document["error"]["message"]
        assert not cache.exists()

    @pytest.mark.parametrize(
        ("options", "variables", "field"),
        [
            (["--port", "99999"], {}, "--port"),
            ([], {"MLAPREP_PORT": "99999"}, "MLAPREP_PORT"),
            (["--host", "0.0.0.0"], {}, "--host"),
            ([], {"MLAPREP_READ_ONLY": "ture"}, "MLAPREP_READ_ONLY"),
        ],
    )
    def test_a_bad_setting_is_named(
        self, run: Run, monkeypatch: pytest.MonkeyPatch, options: list[str], variables: dict[str, str], field: str
    ) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert run("serve", *options, exit_code=2).stderr.startswith(f"error {field}: found ")
        document = json.loads(run("serve", *options, "--json", exit_code=2).stdout)
        assert document["error"]["problems"][0]["field"] == field

    def test_without_the_service_extra_it_is_named(self, tmp_path: Path) -> None:
        code = "import sys; sys.modules['pydantic_settings'] = sys.modules['uvicorn'] = None; "
        code += "sys.argv = ['mlaprep', 'serve']; from mlaprep.clients.cli import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment()
        )
        assert done.returncode == 3
        assert "mlaprep[service,cuda12]" in done.stderr
        assert "internal error" not in done.stderr

    @pytest.mark.parametrize(
        ("host", "shown"),
        [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("[::]", "[::1]"), ("::1", "[::1]"), ("10.0.0.1", "10.0.0.1")],
    )
    def test_the_address_announced_can_be_called(self, host: str, shown: str) -> None:
        assert _reachable(host) == shown


def test_B043_offline_commands_open_no_socket(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLAPREP_OFFLINE", "1")
    monkeypatch.setattr(socket, "socket", lambda *_, **__: pytest.fail("a socket was made"))
    options = [*KIMI, "--arch", "sm_90a", "--url", "http://kernels.test"]
    for command in ("fetch", "compile"):
        assert "offline" in run(command, *options, exit_code=3).stderr
    assert "offline" in run("misses", "--url", "http://kernels.test", exit_code=3).stderr
    assert "MLAPREP_OFFLINE" in run("doctor", "--url", "http://kernels.test").stdout


def test_a_word_that_is_no_switch_does_not_open_a_socket(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLAPREP_OFFLINE", "ture")
    monkeypatch.setattr(socket, "socket", lambda *_, **__: pytest.fail("a socket was made"))
    for command in (["fetch", *KIMI, "--url", "http://kernels.test"], ["doctor", "--url", "http://kernels.test"]):
        assert run(*command, exit_code=2).stderr.startswith("error MLAPREP_OFFLINE: found a string that is no switch")


def test_a_service_that_is_away_is_told_in_short_lines(run: Run) -> None:
    told = run("fetch", *KIMI, "--url", "http://127.0.0.1:9", "--arch", "sm_90a", exit_code=3).stderr
    lines = [line for line in told.splitlines() if not line.startswith("[")]
    assert lines[0] == f"error {VARIANT} sm_90a: not to be had"
    assert any("http://127.0.0.1:9 cannot be reached" in line for line in lines)
    assert "MLAPREP_URL" not in told
    assert "compile --variant" not in told
    assert lines[-1].startswith("→ mlaprep doctor --url http://127.0.0.1:9 ")
    assert max(map(len, lines)) <= 120


def test_compile_stays_here_whatever_the_environment_names(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLAPREP_URL", "http://127.0.0.1:9")
    (kernel,) = json.loads(run("compile", *KIMI, "--arch", "sm_90a", "--json").stdout)["kernels"]
    assert kernel["tier"] == "compiled"
    (shown,) = json.loads(run("show", VARIANT, "--json").stdout)["kernels"]
    assert (shown["current"], shown["damage"]) == (True, None)


def test_the_version_is_told(run: Run) -> None:
    assert run("--version").stdout == f"mlaprep {importlib.metadata.version('mlaprep')}\n"


def test_fetch_wants_a_url(run: Run) -> None:
    assert "MLAPREP_URL" in run("fetch", *KIMI, exit_code=2).stderr
