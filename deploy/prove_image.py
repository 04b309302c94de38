"""What prove_image.sh runs in fresh namespaces: the image's own command, and what must then hold.

    python3 prove_image.py ROOTFS IMAGE.json KERNEL_PATH

ROOTFS is mounted already, read-only; nothing outside it is used by the service. Standard library alone.
"""

import hashlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from fcntl import ioctl
from pathlib import Path
from typing import Any

URL = "http://127.0.0.1:8400"
TOKEN = "of-this-proof-alone"
DEADLINE_S = 60.0
PLAN = """
arch: [sm_90a, sm_103a]
kernels:
  - preset: kimi-k3
    tp: [1, 2, 4, 8]
"""


def raise_loopback() -> None:
    """A new network namespace has its loopback interface down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        ioctl(sock, 0x8914, struct.pack("16sh14x", b"lo", 1))  # SIOCSIFFLAGS, IFF_UP


def request(method: str, path: str) -> tuple[int, bytes]:
    call = urllib.request.Request(URL + path, method=method, headers={"authorization": f"Bearer {TOKEN}"})
    try:
        with urllib.request.urlopen(call, timeout=60) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def expect(condition: object, complaint: str) -> None:
    if not condition:
        raise SystemExit(f"prove_image: {complaint}")


def run_as_image(
    rootfs: str, config: dict[str, Any], command: list[str], *, errors: int | None = None, more: Sequence[str] = ()
) -> "subprocess.Popen[bytes]":
    """A process with the image's user and environment, no capability, and no way to gain one."""
    user, _, group = config["User"].partition(":")
    expect(user.isdigit() and int(user) > 0, f"the image runs as {config['User']!r}, not as a numbered user")
    environ = [*config["Env"], f"MLAPREP_TOKEN={TOKEN}", *more]
    drop = ["setpriv", f"--reuid={user}", f"--regid={group or user}", "--clear-groups", "--no-new-privs"]
    drop += ["--bounding-set=-all", "--inh-caps=-all"]
    return subprocess.Popen(["chroot", rootfs, *drop, "env", "-i", *environ, *command], stderr=errors)


def wait_until_ready(service: "subprocess.Popen[bytes]") -> dict[str, Any]:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        expect(service.poll() is None, f"the service ended with {service.returncode}")
        try:
            status, body = request("GET", "/readyz")
        except OSError:
            status, body = 0, b""
        if status == 200:
            document: dict[str, Any] = json.loads(body)
            return document
        time.sleep(0.02)
    raise SystemExit(f"prove_image: not ready within {DEADLINE_S:.0f} s: {body!r}")


def warm_up(rootfs: str, config: dict[str, Any]) -> None:
    """A plan by the command of the Job in deploy/kubernetes, twice."""
    Path(rootfs, "tmp", "warmup.yaml").write_text(PLAN)
    for expected in ("8 built, 0 found built", "0 built, 8 found built"):
        began = time.monotonic()
        command = [*config["Entrypoint"], "warmup", "--file", "/tmp/warmup.yaml"]
        job = run_as_image(rootfs, config, command, errors=subprocess.PIPE, more=[f"MLAPREP_URL={URL}"])
        _, told = job.communicate(timeout=120)
        expect(job.returncode == 0 and expected in told.decode(), f"the warm-up ended otherwise: {told.decode()}")
        print(f"warm-up of 8 kernels in {time.monotonic() - began:.1f} s: {expected}")


def resident_mb(rootfs: str, pid: int) -> float:
    return int(Path(rootfs, "proc", str(pid), "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def main(rootfs: str, image: str, kernel: str) -> None:
    config = json.loads(Path(image).read_text())["Docker"]["config"]
    raise_loopback()
    try:
        Path(rootfs, "opt", "written").touch()
    except OSError as error:
        expect(error.errno == 30, f"writing to the root failed otherwise: {error}")  # EROFS
    else:
        raise SystemExit("prove_image: the root file system can be written to")

    began = time.monotonic()
    service = run_as_image(rootfs, config, [*config["Entrypoint"], *config["Cmd"]])
    try:
        ready = wait_until_ready(service)
        print(f"ready after {time.monotonic() - began:.2f} s as {config['User']}, root read-only, no network")
        print(f"NVRTC {ready['compiler']['nvrtc_version']}, {ready['compiler']['processes']} compile processes")
        expect(ready["warnings"] == [], f"warnings: {ready['warnings']}")

        sent = time.monotonic()
        status, body = request("PUT", kernel)
        took = time.monotonic() - sent
        expect(status == 201, f"PUT {kernel} answered {status}: {body[:500]!r}")
        manifest = json.loads(body)["manifest"]
        status, cubin = request("GET", f"/v1/artifacts/{manifest['cubin_sha256']}")
        expect(status == 200, f"the artifact answered {status}")
        expect(hashlib.sha256(cubin).hexdigest() == manifest["cubin_sha256"], "other bytes than the manifest names")
        print(f"compiled {manifest['variant_id']} for {manifest['arch']} in {took:.2f} s: {len(cubin)} bytes, verified")
        print(f"resident: {resident_mb(rootfs, service.pid):.0f} MB of the service itself")

        warm_up(rootfs, config)

        test = config["Healthcheck"]["Test"]
        expect(test[0] == "CMD", f"a health check that needs a shell: {test}")
        expect(run_as_image(rootfs, config, test[1:]).wait(30) == 0, "the image's health check failed")
        print("the image's health check passes")
    finally:
        service.send_signal(signal.SIGTERM)
        code = service.wait(40)
    expect(code == 0, f"the service ended with {code} on SIGTERM")
    unhealthy = run_as_image(rootfs, config, test[1:], errors=subprocess.DEVNULL).wait(30)
    expect(unhealthy != 0, "the health check passes without a service")
    print("ended with 0 on SIGTERM, and the health check then fails", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
