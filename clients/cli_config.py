"""The command that shows the service's settings as they are in effect."""

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from mlaprep.clients.cli_options import Json
from mlaprep.clients.cli_output import print_json, reports_errors, stdout
from mlaprep.clients.errors import KernelUnavailable

ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="TOML file of settings. Default: MLAPREP_CONFIG, else none.")
]


def use_config(path: Path | None) -> None:
    """Have this process, and those it starts, read settings from a file."""
    if path is not None:
        os.environ["MLAPREP_CONFIG"] = str(path)


@reports_errors
def config(config: ConfigOption = None, as_json: Json = False) -> None:
    """Show every setting of the service, its value, and whether environment, file or default says so.

    Secrets are masked. What must not be served is an error, as it is when the service starts.
    """
    try:
        from mlaprep.service.effective import effective_settings
    except ModuleNotFoundError as error:
        if str(error.name).startswith("mlaprep"):
            raise
        raise KernelUnavailable(
            f"cannot read settings: {error.name} is not installed; install mlaprep[service]"
        ) from None
    use_config(config)
    settings = effective_settings()
    if as_json:
        rows = [{"name": s.name, "variable": s.variable, "value": s.value, "source": s.source} for s in settings]
        print_json({"config_file": os.environ.get("MLAPREP_CONFIG") or None, "settings": rows})
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("setting", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("from", no_wrap=True)
    for setting in settings:
        style = "" if setting.source == "default" else "bold"
        table.add_row(
            Text(setting.name, style=style), Text(_words(setting.value), style=style), Text(setting.source, style=style)
        )
    stdout().print(table)


def _words(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "" if value is None else str(value)
