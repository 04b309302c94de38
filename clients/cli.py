"""The ``mlaprep`` command: build, look at, fetch, serve and diagnose kernels."""

import importlib.metadata
import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.text import Text

from mlaprep.clients import (
    cli_builds,
    cli_bundle,
    cli_cache,
    cli_config,
    cli_kernels,
    cli_keys,
    cli_misses,
    cli_revoke,
    cli_token,
    cli_warmup,
    cli_worker,
)
from mlaprep.clients.building import Obtained
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
from mlaprep.templates.arch import Arch
from mlaprep.templates.environment import read_switch
from mlaprep.templates.errors import SpecError
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


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mlaprep {importlib.metadata.version('mlaprep')}")
        raise typer.Exit


@app.callback()
def _before_every_command(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand not in ("serve", "worker"):  # processes of their own kind, that log as such
        logging.basicConfig(level=logging.ERROR, format="%(levelname)s %(name)s: %(message)s")
        # What went wrong with the cache is in no error and in no table.
        logging.getLogger("mlaprep.kernels_cache").setLevel(logging.WARNING)


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
        str | None,
        typer.Option(
            "--url", help="Have this service compile, and fetch the result. Default: here; MLAPREP_URL is not asked."
        ),
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
        with KernelClient(url, token=token, store=store, on_miss="error", report_misses=False) as client:
            outcomes = bring(specs, targets, client.obtain, "compiling", quiet=as_json)
            more = look(outcomes, view, save, client.obtain, as_json=as_json)
        report(outcomes, as_json=as_json, more=more, url=url)
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
                told = f"{error}. A service compiles it with --url http://host:port"
                raise KernelUnavailable(told, variant_id=spec.variant_id, arch=str(arch)) from error
            return Obtained(built.artifact, "disk" if built.cached else "compiled", built.cached)

        outcomes = bring(specs, targets, build, "compiling", quiet=as_json)
        compiles = builder.compiles
        more = look(outcomes, view, save, build, as_json=as_json)
    report(outcomes, as_json=as_json, compiles=compiles, more=more)


app.command("ls")(cli_cache.ls)
app.command("show")(cli_cache.show)
app.command("render")(cli_kernels.render)
app.command("fetch")(cli_kernels.fetch)
app.command("gc")(cli_cache.gc)
app.command("diff")(cli_builds.diff)
app.command("verify-build")(cli_builds.verify_build)
app.command("misses")(cli_misses.misses)
app.command("revoke")(cli_revoke.revoke)
app.command("revocations")(cli_revoke.revocations)
app.command("warmup")(cli_warmup.warmup)
app.command("worker")(cli_worker.worker)
app.command("config")(cli_config.config)
app.add_typer(cli_keys.app, name="keys")
app.add_typer(cli_token.app, name="token")
app.add_typer(cli_bundle.app, name="bundle")


@app.command()
@reports_errors
def serve(
    host: Annotated[
        str | None, typer.Option("--host", help="Address to listen on. Default: MLAPREP_HOST or 127.0.0.1.")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option("--port", help="0 picks a free one. Default: MLAPREP_PORT or 8400."),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option("--token", help="Token of every scope. Prefer MLAPREP_TOKENS_FILE: command lines are public."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", help="Processes that answer. Default: MLAPREP_WORKERS or 1.")
    ] = None,
    cache_dir: CacheDir = None,
    config: cli_config.ConfigOption = None,
    port_file: Annotated[
        Path | None, typer.Option("--port-file", dir_okay=False, help="Write the port here once the service listens.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Serve kernels over HTTP until SIGTERM or Ctrl-C. Options win over the environment, that over the file."""
    try:
        from mlaprep.service.server import serve as run_service
        from mlaprep.service.settings import read_settings
    except ModuleNotFoundError as error:
        if str(error.name).startswith("mlaprep"):
            raise
        raise KernelUnavailable(
            f"cannot serve: {error.name} is not installed; install mlaprep[service,cuda12]"
        ) from None
    cli_config.use_config(config)
    options = {"host": host, "port": port, "token": token, "workers": workers, "cache_dir": cache_dir}
    settings = read_settings({name: value for name, value in options.items() if value is not None})

    def announce(bound: int) -> None:
        url = f"http://{_reachable(settings.host)}:{bound}"
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
            console.print(
                Text("No kernel can be had here: neither a compiler, nor a service, nor a bundle.", style="bold red")
            )
    if not examination.usable:
        raise typer.Exit(ExitCode.FAILED)


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    except Exception as error:
        # A defect: say so in a line, and keep the traceback for those who ask for it.
        if _wants_traceback():
            raise
        typer.echo(f"internal error: {type(error).__name__}: {error} (MLAPREP_DEBUG=1 shows where)", err=True)
        sys.exit(ExitCode.FAILED)


def _wants_traceback() -> bool:
    try:
        return read_switch("MLAPREP_DEBUG", os.environ)
    except SpecError:
        return True


def _reachable(host: str) -> str:
    """A host to put into a URL for an address that is listened on: nobody can call 0.0.0.0 or ::."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host.strip("[]"), host.strip("[]"))
    return f"[{shown}]" if ":" in shown else shown


def _describe_compiler() -> str:
    from mlaprep.service.compiler import Compiler

    with Compiler(processes=1) as compiler:
        toolchain = compiler.toolchain()
        archs = compiler.archs()
    targets = f"{len(archs)} targets, {archs[0]} to {archs[-1]}" if archs else "none of the targets known here"
    return f"{toolchain.version} ({Path(toolchain.library).name}), builds {targets}"


if __name__ == "__main__":
    main()
