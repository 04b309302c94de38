"""The ``mlaprep`` command: build, look at, fetch, serve and diagnose kernels."""

import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.text import Text

from mlaprep.clients import cli_kernels
from mlaprep.clients.cli_inspect import Against, Resources, Sass, Save, View
from mlaprep.clients.cli_kernels import bring, look, report
from mlaprep.clients.cli_options import (
    Archs,
    CacheDir,
    Json,
    Overrides,
    Presets,
    SpecFile,
    Token,
    Tps,
    Url,
    Variants,
    open_store,
    select_archs,
    select_specs,
)
from mlaprep.clients.cli_output import ExitCode, checks_table, print_json, reports_errors, stdout
from mlaprep.clients.client import KernelClient
from mlaprep.clients.errors import KernelUnavailable
from mlaprep.clients.supply import Obtained
from mlaprep.templates.arch import Arch
from mlaprep.templates.errors import FieldProblem, SpecError
from mlaprep.templates.spec import KernelSpec

app: Final = typer.Typer(
    name="mlaprep",
    help="Generate, compile, cache and serve the fused MLA prepare kernel.",
    epilog="Exit codes: 0 done, 1 failed, 2 wrong usage or specification, 3 unavailable.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command("compile")
@reports_errors
def compile_(
    presets: Presets = None,
    tps: Tps = None,
    variants: Variants = None,
    spec_file: SpecFile = None,
    overrides: Overrides = None,
    archs: Archs = None,
    url: Annotated[
        str | None, typer.Option("--url", help="Have this service compile, and fetch the result. Default: here.")
    ] = None,
    token: Token = None,
    cache_dir: CacheDir = None,
    save: Save = None,
    sass: Sass = False,
    resources: Resources = False,
    against: Against = None,
    as_json: Json = False,
) -> None:
    """Compile kernels into the local cache. Needs no GPU and no nvcc."""
    view = View(sass, resources, against)
    specs = select_specs(presets, tps, variants, spec_file, overrides)
    targets = select_archs(archs)
    store = open_store(cache_dir)
    if url is not None:
        with KernelClient(url, token=token, store=store, on_miss="error") as client:
            outcomes = bring(specs, targets, client.obtain, "compiling", quiet=as_json)
            more = look(outcomes, view, save, client.obtain, as_json=as_json)
        report(outcomes, as_json=as_json, more=more)
        return
    from mlaprep.service.builder import Builder
    from mlaprep.service.errors import BuildError, CompileFailed

    with Builder(store) as builder:

        def build(spec: KernelSpec, arch: Arch) -> Obtained:
            try:
                built = builder.get_or_compile(spec, arch)
            except CompileFailed:
                raise
            except BuildError as error:  # says nothing of the kernel: it may well compile elsewhere or later
                raise KernelUnavailable(str(error), variant_id=spec.variant_id, arch=str(arch)) from error
            return Obtained(built.artifact, "disk" if built.cached else "compiled", built.cached)

        outcomes = bring(specs, targets, build, "compiling", quiet=as_json)
        compiles = builder.compiles
        more = look(outcomes, view, save, build, as_json=as_json)
    report(outcomes, as_json=as_json, compiles=compiles, more=more)


app.command("ls")(cli_kernels.ls)
app.command("show")(cli_kernels.show)
app.command("render")(cli_kernels.render)
app.command("fetch")(cli_kernels.fetch)
app.command("gc")(cli_kernels.gc)


@app.command()
@reports_errors
def serve(
    host: Annotated[
        str | None, typer.Option("--host", help="Address to listen on. Default: MLAPREP_HOST or 127.0.0.1.")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option("--port", min=0, max=65535, help="0 picks a free one. Default: MLAPREP_PORT or 8400."),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option("--token", help="Token that building asks for. Prefer MLAPREP_TOKEN: command lines are public."),
    ] = None,
    cache_dir: CacheDir = None,
    port_file: Annotated[
        Path | None, typer.Option("--port-file", dir_okay=False, help="Write the port here once the service listens.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Serve kernels over HTTP until SIGTERM or Ctrl-C. Settings come from the environment, options win."""
    from pydantic import ValidationError

    from mlaprep.service.server import serve as run_service
    from mlaprep.service.settings import Settings

    given: dict[str, Any] = {"host": host, "port": port, "token": token, "cache_dir": cache_dir}
    try:
        settings = Settings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        raise SpecError([_setting_problem(fault) for fault in error.errors(include_input=False)]) from None

    def announce(bound: int) -> None:
        shown = f"[{settings.host}]" if ":" in settings.host else settings.host
        url = f"http://{shown}:{bound}"
        if port_file is not None:
            temporary = port_file.with_name(f".{port_file.name}.{os.getpid()}")
            temporary.write_text(str(bound))
            temporary.replace(port_file)
        if as_json:
            print_json({"url": url, "host": settings.host, "port": bound, "pid": os.getpid()})
            sys.stdout.flush()
        else:
            typer.echo(f"mlaprep serves on {url}, {url}/docs lists the calls; Ctrl-C stops it")

    try:
        run_service(settings, on_listening=announce)
    except SystemExit as error:  # uvicorn's way to say that it did not start
        raise typer.Exit(ExitCode.FAILED if error.code else ExitCode.OK) from None


@app.command()
@reports_errors
def doctor(url: Url = None, token: Token = None, cache_dir: CacheDir = None, as_json: Json = False) -> None:
    """Say what this machine can do with kernels, what it lacks, and what to do about it."""
    from mlaprep.clients.doctor import examine
    from mlaprep.service.toolchain import conflicts

    examination = examine(_describe_compiler, conflicts, url=url, token=token, cache_dir=cache_dir)
    if as_json:
        checks = [
            {"name": check.name, "status": check.status, "found": check.found, "advice": check.advice}
            for check in examination.checks
        ]
        print_json({"usable": examination.usable, "checks": checks})
    else:
        console = stdout()
        console.print(checks_table(examination.checks))
        if not examination.usable:
            console.print(Text("No kernel can be had here: neither a compiler nor a service.", style="bold red"))
    if not examination.usable:
        raise typer.Exit(ExitCode.FAILED)


def main() -> None:
    """Entry point of the console script."""
    logging.basicConfig(level=logging.ERROR, format="%(levelname)s %(name)s: %(message)s")
    try:
        app()
    except Exception as error:
        # A defect: say so in a line, and keep the traceback for those who ask for it.
        if os.environ.get("MLAPREP_DEBUG"):
            raise
        typer.echo(f"internal error: {type(error).__name__}: {error} (MLAPREP_DEBUG=1 shows where)", err=True)
        sys.exit(ExitCode.FAILED)


def _setting_problem(fault: Mapping[str, Any]) -> FieldProblem:
    name = ".".join(map(str, fault["loc"])) or "settings"
    return FieldProblem(name, "a value that is not allowed", str(fault["msg"]).removeprefix("Value error, "))


def _describe_compiler() -> str:
    from mlaprep.service.compiler import Compiler

    with Compiler(processes=1) as compiler:
        toolchain = compiler.toolchain()
        archs = compiler.archs()
    targets = f"{len(archs)} targets, {archs[0]} to {archs[-1]}" if archs else "none of the targets known here"
    return f"{toolchain.version} ({Path(toolchain.library).name}), builds {targets}"


if __name__ == "__main__":
    main()
