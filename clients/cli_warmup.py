"""The command that builds kernels ahead of a rollout, here or in a service, and shows how far it is."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from mlaprep.clients.cli_options import (
    Archs,
    CacheDir,
    Json,
    Overrides,
    Presets,
    Token,
    Tps,
    Url,
    Variants,
    full_variant_id,
    open_store,
    override_fields,
)
from mlaprep.clients.cli_output import print_json, reports_errors, stderr
from mlaprep.clients.client import offline_by_environment
from mlaprep.clients.errors import (
    ArtifactRejected,
    FieldProblem,
    KernelUnavailable,
    ServiceError,
    ServiceRefused,
    ServiceUnreachable,
    SpecError,
)
from mlaprep.clients.replies import plain
from mlaprep.clients.rest import RestTransport
from mlaprep.kernels_cache.opening import folder_of

Job = Mapping[str, Any]

_FINISHED: Final = ("done", "failed", "cancelled", "interrupted")
_POLL_S: Final = 0.2
_PATIENCE_S: Final = 60.0
_PASSING: Final = (429, 502, 503, 504)  # a replica that drains or starts, a proxy without one, a Redis that restarts
_MAX_FILE_BYTES: Final = 2**20


@reports_errors
def warmup(
    presets: Presets = None,
    tps: Tps = None,
    variants: Variants = None,
    overrides: Overrides = None,
    archs: Archs = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", metavar="FILE", help="A plan in YAML or JSON, e.g. warmup.yaml.")
    ] = None,
    misses: Annotated[
        int | None,
        typer.Option("--misses", min=1, metavar="N", help="Up to N kernels that the service's workers lacked."),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch/--no-watch", help="Wait for the end, and show how far it is.")] = True,
    url: Url = None,
    token: Token = None,
    cache_dir: CacheDir = None,
    as_json: Json = False,
) -> None:
    """Build kernels ahead of a rollout: in a service, or into the local cache where no service is named."""
    plan = read_plan(file) if file is not None else {}
    plan = _with_options(plan, presets, tps, variants, overrides, archs, misses)
    if url:
        if offline_by_environment():
            raise KernelUnavailable("offline (MLAPREP_OFFLINE), so no service was asked to warm up")
        job = _in_service(RestTransport(url, token), plan, watch, quiet=as_json)
    else:
        if not watch:
            raise SpecError(FieldProblem("watch", "--no-watch without a service", "--url, or no --no-watch"))
        job = _here(plan, cache_dir, quiet=as_json)
    if as_json:
        print_json(dict(job))
    else:
        _print_summary(job)
    if job["state"] not in ("done", "queued", "running"):
        raise typer.Exit(1)


def read_plan(file: Path) -> dict[str, Any]:
    """A plan from a file.

    Raises:
        SpecError: no YAML or JSON, or no mapping; the line is given where there is one.
        OSError: a file that cannot be read.
    """
    import yaml

    with file.open("rb") as opened:
        text = opened.read(_MAX_FILE_BYTES + 1)
    if len(text) > _MAX_FILE_BYTES:
        raise SpecError(FieldProblem("file", f"more than {_MAX_FILE_BYTES} bytes", "a smaller plan"))
    try:
        plan = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" (line {mark.line + 1}, column {mark.column + 1})"
        raise SpecError(
            FieldProblem("file", f"text that is no YAML{where}", "a plan, as docs/warmup.md has it")
        ) from None
    if not isinstance(plan, dict):
        raise SpecError(FieldProblem("file", "no mapping", 'a mapping with "kernels"'))
    return plan


def _with_options(
    plan: dict[str, Any],
    presets: Sequence[str] | None,
    tps: Sequence[str] | None,
    variants: Sequence[str] | None,
    overrides: Sequence[str] | None,
    archs: Sequence[str] | None,
    misses: int | None,
) -> dict[str, Any]:
    """The plan of a file, and what the command line adds to it."""
    entries: list[dict[str, Any]] = []
    for name in presets or ():
        entry: dict[str, Any] = {"preset": name, "set": override_fields(overrides)}
        if tps and "all" not in tps:
            entry["tp"] = [int(text) if text.isascii() and text.isdigit() and len(text) < 5 else text for text in tps]
        entries.append(entry)
    entries += [{"variant_id": full_variant_id(text)} for text in variants or ()]
    if archs:
        entries = [entry | {"arch": list(archs)} for entry in entries]
    given = plan.get("kernels")
    if entries and isinstance(given, list | None):
        plan = plan | {"kernels": [*(given or []), *entries]}
    return plan if misses is None else plan | {"misses": misses}


def _in_service(transport: RestTransport, plan: dict[str, Any], watch: bool, *, quiet: bool) -> Job:
    try:
        job = _checked(transport.send("POST", "/v1/warmups", plan), transport.url)
        with _shown(job, quiet=quiet) as show:
            while watch and job["state"] not in _FINISHED:
                time.sleep(_POLL_S)
                job = _as_of_now(transport, job, show)
                show(job)
        return job
    except ServiceRefused as error:
        if error.problems:  # the plan's own faults, by their places in it
            raise SpecError(list(error.problems)) from error
        raise
    finally:
        transport.close()


def _as_of_now(transport: RestTransport, job: Job, show: Callable[[Job], None]) -> Job:
    """The job as the service tells it, over a restart of the service or of its Redis: the job outlives both."""
    give_up = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return _checked(transport.document(f"/v1/warmups/{job['id']}"), transport.url)
        except ServiceError as error:
            is_passing = isinstance(error, ServiceUnreachable) or getattr(error, "status", 0) in _PASSING
            if not is_passing or time.monotonic() >= give_up:
                raise
        show({**job, "note": "the service does not answer"})
        time.sleep(_POLL_S)


def _here(plan: dict[str, Any], cache_dir: str | None, *, quiet: bool) -> Job:
    from mlaprep.service.builder import Builder
    from mlaprep.service.job_store import JobStore
    from mlaprep.service.jobs import Jobs
    from mlaprep.templates.plans import parse_plan

    targets = parse_plan(plan)
    store = open_store(cache_dir)
    with Builder(store) as builder:
        jobs = Jobs(builder, JobStore(folder_of(store)))
        try:
            found, _ = jobs.submit(targets)
            with _shown(found.to_document(), quiet=quiet) as show:
                while not found.finished:
                    time.sleep(_POLL_S / 4)
                    found = jobs.store.get(found.id) or found
                    show(found.to_document())
            return found.to_document(with_plan=True)
        finally:
            jobs.close()


@contextlib.contextmanager
def _shown(job: Job, *, quiet: bool) -> Iterator[Callable[[Job], None]]:
    console = stderr()
    if quiet:
        yield lambda job: None
        return
    if not console.is_terminal:
        told = ""

        def tell(job: Job) -> None:
            nonlocal told
            line = f"[{job['done']}/{job['total']}] {job['note'] or job['state']}"
            if line != told:
                told = line
                console.print(Text(line), soft_wrap=True)

        tell(job)
        yield tell
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("warming up", total=job["total"], completed=job["done"])
        yield lambda job: bar.update(
            task, description=job["note"] or "warming up", completed=job["done"], total=job["total"]
        )


def _print_summary(job: Job) -> None:
    console = stderr()
    counts = f"{job['built']} built, {job['cached']} found built, {job['failed']} failed, of {job['total']}"
    state = ", ".join(filter(None, (job["state"], job["note"])))
    console.print(Text(f"warm-up {job['id']} {state}: {counts}"), soft_wrap=True)
    for failure in job["failures"]:
        line = f"{failure['variant_id']} for {failure['arch']}: {failure['detail']}"
        console.print(Text(line, "red"), soft_wrap=True)


def _checked(reply: Any, url: str) -> Job:
    """A job from a service, every text of it fit for a terminal.

    Raises:
        ArtifactRejected: a reply that is none.
    """
    try:
        job = {name: reply[name] for name in ("total", "done", "built", "cached", "failed")}
        if not all(isinstance(number, int) and not isinstance(number, bool) for number in job.values()):
            raise TypeError
        texts = {name: plain(str(reply.get(name, ""))) for name in ("id", "state", "note")}
        if not texts["id"] or not texts["state"]:
            raise KeyError("id, state")
        failures = [
            {name: plain(str(failure[name])) for name in ("variant_id", "arch", "detail")}
            for failure in reply["failures"]
        ]
    except (TypeError, KeyError, AttributeError):
        raise ArtifactRejected(f"{url} sent no warm-up job; is it an mlaprep service of this release?") from None
    return job | texts | {"failures": failures}
