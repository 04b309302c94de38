"""The service as an ASGI application: ``uvicorn --factory mlaprep.service.app:create_app``."""

import asyncio
import functools
import logging
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from mlaprep.kernels_cache.store import KernelStore
from mlaprep.service import problems
from mlaprep.service.auth import requirement_of
from mlaprep.service.body import BodyLimit
from mlaprep.service.compiler import Compiler
from mlaprep.service.drain import Drain, DrainGate
from mlaprep.service.edge import Edge
from mlaprep.service.hot_artifacts import HOT_BYTES, HotArtifacts
from mlaprep.service.metrics import PUBLISH_S, Metrics
from mlaprep.service.observed import Observed, RouteNote
from mlaprep.service.overload import Load, OverloadGate
from mlaprep.service.release import release_version
from mlaprep.service.request_schemas import shared_schemas
from mlaprep.service.routes import (
    artifacts,
    builds,
    dashboard,
    documentation,
    health,
    inspection,
    kernels,
    metrics,
    misses,
    reference,
    revocations,
    variants,
    vocabulary,
    warmups,
)
from mlaprep.service.schemas import ProblemReply
from mlaprep.service.settings import Settings, read_settings, split_words
from mlaprep.service.state import Service, in_thread

_ROUTERS: Final = (
    kernels.router,
    inspection.router,
    builds.router,
    artifacts.router,
    variants.router,
    vocabulary.router,
    misses.router,
    revocations.router,
    warmups.router,
    health.router,
    metrics.router,
    reference.router,
    dashboard.router,
)
_DESCRIPTION: Final = (
    "Generates, compiles, caches and serves the fused MLA prepare kernel. Errors are problem details "
    "(RFC 9457) that name the field at fault and never repeat input. Every GET also answers HEAD."
)
_log = logging.getLogger(__name__)


class _App(FastAPI):
    """With one layer in front of the framework's own, which take longer than a reply that is repeated."""

    front: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.front(scope, receive, send)


def create_app(
    settings: Settings | None = None, *, store: KernelStore | None = None, compiler: Compiler | None = None
) -> FastAPI:
    """An application of its own; nothing is shared between two.

    Opens the cache directory. Compile processes start with the application's lifespan, or when first needed.

    Args:
        settings: by default from the environment.
        store, compiler: in place of those that the settings describe.

    Raises:
        SpecError: settings that must not be served, see :class:`Settings`.
    """
    service = Service.assemble(settings or read_settings(), store, compiler)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        for warning in service.logged_warnings:
            _log.warning("%s", warning)
        if not service.settings.read_only:
            service.compiler.start()
        service.catalog.start()
        publishing = asyncio.create_task(_publish(measured)) if measured.shared else None
        try:
            yield
        finally:
            if publishing is not None:
                publishing.cancel()
            await in_thread(service.close)
            measured.close()

    app = _App(
        title="mlaprep",
        version=release_version(),
        description=_DESCRIPTION,
        lifespan=lifespan,
        openapi_url=None,  # in routes.reference, where it takes a scope like every route
        docs_url=None,  # the framework's pages load scripts from elsewhere; ours is in routes.reference
        redoc_url=None,
        redirect_slashes=False,  # a redirect would repeat the Host header of whoever asked
        telemetry={"tracing": _traces(), "metrics": False, "logs": False},
    )
    app.state.service = service
    drain = app.state.drain = Drain()
    load = app.state.load = Load()
    measured = app.state.metrics = Metrics(service, lambda: drain.began)
    service.builder.observe = measured.compiled
    problems.install(app)
    # The last added is met first.
    app.add_middleware(RouteNote)
    app.add_middleware(
        BodyLimit, max_bytes=service.settings.max_body_bytes, timeout_s=service.settings.request_timeout_s
    )
    app.add_middleware(OverloadGate, load=load)
    app.add_middleware(DrainGate, drain=drain)
    app.add_middleware(Edge, methods=_methods_of)
    if origins := split_words(service.settings.cors_origins):
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "HEAD", "PUT", "POST", "DELETE"],
            allow_headers=["Authorization", "Content-Type", "If-None-Match", "X-Request-ID"],
            expose_headers=["ETag", "Retry-After", "WWW-Authenticate", "X-Request-ID"],
        )
    app.add_middleware(Observed, metrics=measured, access_log=service.settings.access_log)
    app.front = HotArtifacts(
        functools.partial(FastAPI.__call__, app),
        # Where every request has a line in the log, these have one too.
        is_open=lambda: not (drain.began or load.is_beyond or service.settings.access_log),
        max_bytes=min(HOT_BYTES, service.settings.memory_max_bytes),
        counts=measured.hot,
    )
    for router in _ROUTERS:
        app.include_router(router)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]  # the documented way to extend it
    return app


async def _publish(measured: Metrics) -> None:
    """Keep what other workers tell of this one up to date."""
    while True:
        try:
            await in_thread(measured.publish)
        except Exception:  # whatever it was, the next one may come through
            _log.exception("counts of this worker were not published")
        await asyncio.sleep(PUBLISH_S)


def _traces() -> bool:
    """Whether this process has set up a tracer provider.

    Where it has not, FastAPI would ask for one at every request, which takes 33 µs, as long as all of uvicorn.
    """
    trace: Any = sys.modules.get("opentelemetry.trace")
    return trace is not None and not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


def _methods_of(path: str) -> Sequence[str]:
    """Methods of a path, HEAD and OPTIONS among them; empty where there is no such resource."""
    methods: set[str] = set()
    for router in _ROUTERS:
        for route in router.routes:
            if isinstance(route, APIRoute) and route.path_regex.fullmatch(path):
                methods |= set(route.methods or ())
    if methods:
        methods.add("OPTIONS")
    if "GET" in methods:
        methods.add("HEAD")
    return sorted(methods)


def _openapi(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        components = document.setdefault("components", {})
        schema = ProblemReply.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas = schema.pop("$defs", {}) | {ProblemReply.__name__: schema} | shared_schemas()
        components.setdefault("schemas", {}).update(schemas)
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        for route in (route for router in _ROUTERS for route in router.routes):
            _describe_scope(route, document["paths"])
        app.openapi_schema = document
    return app.openapi_schema


def _describe_scope(route: Any, paths: dict[str, Any]) -> None:
    """Say of a documented route which scope it takes, and what callers without get."""
    required = requirement_of(route)
    if required is None or required.scope is None or route.path not in paths:
        return
    refusals = documentation.problems(401, 403)
    for method in route.methods:
        operation = paths[route.path][method.lower()]
        operation["security"] = [{"token": [required.scope]}, {}]
        for status, described in refusals.items():
            operation["responses"].setdefault(str(status), described)
