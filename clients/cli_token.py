"""Commands for tokens: make one, and show those of a token file."""

from pathlib import Path
from typing import Annotated, Final

import typer
from rich.table import Table
from rich.text import Text

from mlaprep.clients.cli_options import Json
from mlaprep.clients.cli_output import print_json, reports_errors, stderr, stdout

app: Final = typer.Typer(help="Tokens that callers of the service bring.", no_args_is_help=True)


@app.command()
@reports_errors
def create(
    scope: Annotated[str, typer.Option("--scope", help="read, build or admin; each includes those before it.")],
    name: Annotated[str, typer.Option("--name", help="Who will hold it; several tokens may have one name.")],
    expires: Annotated[
        str | None, typer.Option("--expires", help="UTC date or time from which it is no longer taken.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Make a token. It is printed once, and kept nowhere; the line below it is for the service's token file."""
    from mlaprep.service.tokens import make_token

    secret, token = make_token(name, scope, expires)
    if as_json:
        print_json({"token": secret, "line": token.line()})
        return
    typer.echo(secret)
    typer.echo(token.line())
    stderr().print(
        Text(
            "The first line is the token, for MLAPREP_TOKEN of whoever calls; it is not shown again. Add the second to "
            "the file of MLAPREP_TOKENS_FILE: the service takes it at once."
        ),
        soft_wrap=True,
    )


@app.command("list")
@reports_errors
def list_(
    file: Annotated[
        Path, typer.Option("--file", envvar="MLAPREP_TOKENS_FILE", help="The token file. Default: MLAPREP_TOKENS_FILE.")
    ],
    as_json: Json = False,
) -> None:
    """Show who has a token, for what and until when. To take a token back, remove its line."""
    from mlaprep.service.token_file import TokenFile

    rows = [
        {
            "name": token.name,
            "scope": token.scope,
            "digest": token.digest,
            "expires": None if token.expires is None else token.expires.isoformat().replace("+00:00", "Z"),
            "valid": token.is_valid(),
        }
        for token in TokenFile.open(file).tokens()
    ]
    if as_json:
        print_json({"tokens": rows})
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("name", "scope", "digest", "until"):
        table.add_column(column, no_wrap=True)
    for row in rows:
        until = Text(str(row["expires"] or "its line is removed"), style="" if row["valid"] else "red")
        if not row["valid"]:
            until.append(" (past)")
        table.add_row(Text(str(row["name"]), style="bold"), str(row["scope"]), f"{str(row['digest'])[:12]}…", until)
    stdout().print(table)
