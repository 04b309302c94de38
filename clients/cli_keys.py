"""Commands for signing keys: make one, and show the public half that workers pin."""

from pathlib import Path
from typing import Annotated, Final

import typer
from rich.text import Text

from mlaprep.clients.cli_options import Json
from mlaprep.clients.cli_output import fields_table, print_json, reports_errors, stderr, stdout
from mlaprep.kernels_cache.key_files import generate_key, read_signing_key
from mlaprep.kernels_cache.signing import PublicKey

app: Final = typer.Typer(help="Keys that sign kernels, and that workers pin.", no_args_is_help=True)


@app.command()
@reports_errors
def generate(
    output: Annotated[Path, typer.Argument(help="New file for the private key; none is ever overwritten.")],
    as_json: Json = False,
) -> None:
    """Make an Ed25519 key. Prints its public half; the private one goes to a file of mode 0600 and nowhere else."""
    _print(generate_key(output).public, as_json=as_json)
    if not as_json:
        told = "a service signs with it by MLAPREP_SIGNING_KEY; workers pin the public key by MLAPREP_TRUSTED_KEYS"
        stderr().print(Text(f"{output}: {told}"), soft_wrap=True)


@app.command()
@reports_errors
def show(
    key: Annotated[Path, typer.Argument(help="File of a private key.")],
    as_json: Json = False,
) -> None:
    """Print the public half of a private key, as workers pin it, and its id."""
    _print(read_signing_key(key).public, as_json=as_json)


def _print(key: PublicKey, *, as_json: bool) -> None:
    if as_json:
        print_json({"key_id": key.key_id, "public_key": key.text})
    elif stdout().is_terminal:
        stdout().print(fields_table([("key id", key.key_id), ("public key", key.text)]))
    else:
        typer.echo(key.text)
