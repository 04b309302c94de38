"""nginx with the example configuration, in front of the service."""

import contextlib
import datetime
import ipaddress
import os
import shutil
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from deploy_kit import Proxy, ProxyMaker, free_port
from service_kit import wait_for


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked ``image`` take minutes and root: only those who ask for them, by ``-m image``, get them."""
    if "image" in config.option.markexpr:
        return
    left_out = [item for item in items if item.get_closest_marker("image")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that signed itself, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    crt, private = folder / "tls.crt", folder / "tls.key"
    crt.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return crt, private


def replaced(text: str, changes: dict[str, str]) -> str:
    """A text with each passage exchanged; one that is not there is a mistake of the test."""
    for old, new in changes.items():
        assert old in text, f"nginx.conf has no {old!r} any more"
        text = text.replace(old, new)
    return text


@pytest.fixture
def run_nginx(root: Path, tmp_path: Path, certificate: tuple[Path, Path]) -> ProxyMaker:
    """Starts nginx with deploy/nginx.conf, its paths, ports and upstreams those of the test."""
    nginx = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if nginx is None:
        pytest.skip("nginx is not installed")

    @contextlib.contextmanager
    def run(*upstreams: str, **changes: str) -> Iterator[Proxy]:
        port, folder = free_port(), tmp_path / "nginx"
        (folder / "cache").mkdir(parents=True)
        servers = "\n".join(f"server {upstream} max_fails=2 fail_timeout=5s;" for upstream in upstreams)
        text = replaced(
            (root / "deploy" / "nginx.conf").read_text(),
            {
                "/tmp/": f"{folder}/",
                "/var/cache/nginx/": f"{folder}/cache/",
                "/etc/nginx/tls/tls.crt": str(certificate[0]),
                "/etc/nginx/tls/tls.key": str(certificate[1]),
                "listen 8443 ": f"listen 127.0.0.1:{port} ",
                "server mlaprep:8400 max_fails=2 fail_timeout=5s;": servers,
                "/dev/stdout": str(folder / "access.log"),
                "/dev/stderr": str(folder / "error.log"),
                "worker_processes auto;": "worker_processes 1;",
            }
            | changes,
        )
        config = folder / "nginx.conf"
        config.write_text(text)
        log = folder / "start.log"
        # As root its workers would change to a user that cannot read the test's folder.
        own_user = "daemon off;" if os.geteuid() else "daemon off; user root;"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [nginx, "-e", str(log), "-c", str(config), "-g", own_user], stdout=output, stderr=subprocess.STDOUT
            )
        proxy = Proxy(port, ssl.create_default_context(cafile=str(certificate[0])), folder)

        def listens() -> bool:
            assert process.poll() is None, log.read_text()
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                return True
            return False

        try:
            wait_for(listens)
            yield proxy
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(10)

    return run
