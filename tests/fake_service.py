"""A kernel service behind an httpx transport, and kernels for it to hand out."""

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
from cache.samples import make_artifact

from mlaprep.clients.rest import RestTransport
from mlaprep.kernels_cache.artifact import KernelArtifact
from mlaprep.templates.render import render
from mlaprep.templates.spec import KernelSpec, parse_variant_id

URL = "http://kernels.test:8400"


def artifact_of(spec: KernelSpec, arch: str = "sm_90a", source: str | None = None, **changes: Any) -> KernelArtifact:
    """A kernel that passes every check for the spec: the rendered source, and an ELF file in place of code."""
    rendered = render(spec)
    members = {
        "variant_id": spec.variant_id,
        "spec": spec.to_dict(),
        "entry": rendered.entry,
        "launch": rendered.launch,
    }
    return make_artifact(source or rendered.text, arch, **members | changes)


def reply_of(artifact: KernelArtifact, **changes: Any) -> dict[str, Any]:
    """The service's inline reply."""
    reply = {
        "manifest": artifact.manifest.to_dict(),
        "cached": True,
        "cubin_base64": base64.b64encode(artifact.cubin).decode(),
    }
    return reply | changes


@dataclass
class FakeService:
    """Answers every kernel request with the kernel asked for, unless ``answer`` is replaced."""

    requests: list[httpx.Request] = field(default_factory=list)
    """Without reports of misses, which come in the background."""
    reports: list[httpx.Request] = field(default_factory=list)
    looks: list[httpx.Request] = field(default_factory=list)
    """For revocations, which come in the background too."""
    answer: Callable[[httpx.Request], httpx.Response] | None = None
    revoked: Callable[[httpx.Request], httpx.Response] = lambda request: httpx.Response(200, json={"revocations": []})

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/misses" and request.method == "POST":
            self.reports.append(request)
            return httpx.Response(200, json={"recorded": 1, "ignored": 0})
        if request.url.path == "/v1/revocations":
            self.looks.append(request)
            return self.revoked(request)
        self.requests.append(request)
        return self.answer(request) if self.answer is not None else self.kernel(request)

    def kernel(self, request: httpx.Request) -> httpx.Response:
        _, _, _, arch, variant_id, *_ = request.url.path.split("/")
        return httpx.Response(200, json=reply_of(artifact_of(parse_variant_id(variant_id), arch)))

    @property
    def calls(self) -> list[str]:
        return [f"{request.method} {request.url.path}" for request in self.requests]

    def transport(self, **options: Any) -> RestTransport:
        return RestTransport(URL, transport=httpx.MockTransport(self), **options)


def problem(status: int, slug: str, **members: Any) -> httpx.Response:
    document = {"type": f"urn:mlaprep:problem:{slug}", "title": "A problem", "status": status, **members}
    return httpx.Response(status, headers={"content-type": "application/problem+json"}, content=json.dumps(document))
