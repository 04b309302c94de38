"""deploy/compose.yaml: services that are held tight, and agree with the image, the routes, the settings and the CLI."""

import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from deploy_kit import IMAGE_USER, accepts, parses, routes, setting_names

Document = dict[str, Any]
IMAGE = re.compile(r"[a-z0-9-]+(/[a-z0-9-]+)?:v?[0-9a-z.]+")
"""A public image as people write it, with a tag: no host of a registry."""


@pytest.fixture(scope="module")
def file(root: Path) -> Path:
    return root / "deploy" / "compose.yaml"


@pytest.fixture(scope="module")
def compose(file: Path) -> Document:
    document: Document = yaml.safe_load(file.read_text())
    return document


@pytest.fixture(scope="module")
def services(compose: Document) -> dict[str, Document]:
    services: dict[str, Document] = compose["services"]
    return services


def own(services: dict[str, Document]) -> dict[str, Document]:
    return {name: service for name, service in services.items() if service["image"].startswith("mlaprep:")}


def test_services_may_do_nothing_that_they_need_not(services: dict[str, Document]) -> None:
    for name, service in services.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert int(service["user"].partition(":")[0]) > 0, name
        assert {"cpus", "memory", "pids"} == set(service["deploy"]["resources"]["limits"]), name
        assert IMAGE.fullmatch(service["image"]), name
        assert not {"privileged", "network_mode", "pid", "ipc", "devices", "cap_add"} & set(service), name
    for name, service in own(services).items():
        assert service["user"] == "{}:{}".format(*IMAGE_USER), name


def test_every_service_has_a_health_check(services: dict[str, Document]) -> None:
    asked = set()
    for name, service in services.items():
        check = service["healthcheck"]
        if check.get("disable"):
            assert "ports" not in service, f"{name} listens"
            continue
        assert check["test"][0] == "CMD", f"{name}: a shell may not be there"
        if name in ("service", "nginx"):
            (url,) = re.findall(r"https?://[^'\"\s]+", " ".join(check["test"]))
            assert ("GET", urlsplit(url).path) in routes()
            asked.add(name)
        for other in service.get("depends_on", {}):
            assert not services[other]["healthcheck"].get("disable")
    assert asked == {"service", "nginx"}


def test_only_tls_is_open_to_others(services: dict[str, Document]) -> None:
    opened = {name: port for name, s in services.items() for port in s.get("ports", ()) if "127.0.0.1:" not in port}
    assert opened == {"nginx": "443:8443"}


def test_variables_are_settings_with_values_that_hold(services: dict[str, Document], root: Path) -> None:
    default = re.findall(r'"([^"]+)"', (root / "Dockerfile").read_text().rsplit("CMD [", 1)[1])
    for name, service in own(services).items():
        assert set(service["environment"]) <= setting_names(), name
        command = service.get("command", default)
        assert parses(command), name
        if command[0] == "serve":
            assert accepts(service["environment"], command), name


def test_volumes_networks_and_secrets_are_declared_and_used(compose: Document, file: Path, root: Path) -> None:
    volumes, networks, secrets = set(), set(), set()
    for name, service in compose["services"].items():
        for volume in service.get("volumes", ()):
            source, _, *mode = volume.split(":")
            if source.startswith("."):
                assert (file.parent / source).exists(), f"{name}: {source}"
                assert mode == ["ro"], f"{name}: {source}"
            else:
                volumes.add(source)
        networks |= set(service["networks"])
        secrets |= {s["source"] if isinstance(s, dict) else s for s in service.get("secrets", ())}
    assert volumes == set(compose["volumes"])
    assert networks == set(compose["networks"])
    assert secrets == set(compose["secrets"])
    ignored = (root / ".gitignore").read_text().split()
    assert all(entry["file"].startswith("./secrets/") for entry in compose["secrets"].values())
    assert "/deploy/secrets/" in ignored


def test_redis_is_reached_by_the_service_alone(compose: Document, services: dict[str, Document]) -> None:
    assert compose["networks"]["back"] == {"internal": True}
    on_it = {name for name, service in services.items() if "back" in service["networks"]}
    assert on_it == {"redis", *own(services)}
    assert services["redis"]["networks"] == ["back"]
    assert "ports" not in services["redis"]


def test_what_is_written_lies_on_a_volume(services: dict[str, Document], root: Path) -> None:
    cache = re.search(r"MLAPREP_CACHE_DIR=(\S+)", (root / "Dockerfile").read_text())
    assert cache
    for name, service in own(services).items():
        places = [v.split(":")[1] for v in service.get("volumes", ())] + [v.split(":")[0] for v in service["tmpfs"]]
        assert {"/tmp", str(Path(cache[1]).parent)} <= set(places), name


def test_a_drain_is_given_its_time(services: dict[str, Document]) -> None:
    from mlaprep.service.settings import Settings

    for name, service in own(services).items():
        assert int(service["stop_grace_period"].removesuffix("s")) > Settings().shutdown_grace_s, name


def test_nginx_finds_the_service_by_its_name(compose: Document, root: Path) -> None:
    text = (root / "deploy" / "nginx.conf").read_text()
    (host,) = re.findall(r"^ +server ([a-z]+):8400 ", text, re.MULTILINE)
    assert host in compose["services"]["service"]["networks"]["front"]["aliases"]
    nginx = compose["services"]["nginx"]
    assert {secret["target"] for secret in nginx["secrets"]} == set(re.findall(r"/etc/nginx/tls/[a-z.]+", text))
    assert f"listen {nginx['ports'][0].split(':')[1]} ssl" in text
    written = {Path(path).parent for path in re.findall(r"(?:_path|pid) (/[\w./-]+)", text)}
    assert {str(path) for path in written} == {place.split(":")[0] for place in nginx["tmpfs"]}
