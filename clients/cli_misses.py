"""The command that lists what workers asked a service for and lacked."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from mlaprep.clients.cli_options import Json, Token, Url
from mlaprep.clients.cli_output import FULL_TABLE_WIDTH, VARIANT_PREFIX, print_json, reports_errors, stderr, stdout
from mlaprep.clients.client import offline_by_environment
from mlaprep.clients.errors import ArtifactRejected, FieldProblem, KernelUnavailable, SpecError
from mlaprep.clients.replies import plain
from mlaprep.clients.rest import RestTransport
from mlaprep.templates.arch import Arch

_TEXTS: Final = ("variant_id", "arch", "state", "first_seen", "last_seen")
_STATE_STYLES: Final = {"built": "green", "building": "yellow", "failed": "bold red", "missing": "red"}


@reports_errors
def misses(
    arch: Annotated[str | None, typer.Option("--arch", metavar="ARCH", help="Only kernels for this target.")] = None,
    latest: Annotated[bool, typer.Option("--latest", help="The latest first, not the most frequent.")] = False,
    limit: Annotated[int, typer.Option("--limit", min=1, max=500, help="Kernels to list.")] = 50,
    url: Url = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """List the kernels that workers asked a service for and lacked, and how far each is by now."""
    if not url:
        raise SpecError(FieldProblem("url", "nothing", "--url http://host:port, or MLAPREP_URL"))
    wanted = "" if arch is None else f"&arch={Arch(arch)}"
    if offline_by_environment():
        raise KernelUnavailable("offline (MLAPREP_OFFLINE), so no service was asked what its workers lacked")
    transport = RestTransport(url, token)
    try:
        page = transport.document(f"/v1/misses?order={'last_seen' if latest else 'count'}&limit={limit}{wanted}")
    finally:
        transport.close()
    rows = _rows(page, transport.url)
    if as_json:
        print_json({"misses": rows, "total": page["total"]})
        return
    console = stdout()
    if not rows:
        stderr().print(Text(f"Workers of {transport.url} lacked nothing that it was told of."), soft_wrap=True)
        return
    console.print(_table(rows, narrow=console.width < FULL_TABLE_WIDTH))
    if page["total"] > len(rows):
        stderr().print(Text(f"{page['total'] - len(rows)} more; --limit shows up to 500"), soft_wrap=True)


def _rows(page: Any, url: str) -> list[dict[str, Any]]:
    """The listing's rows, every text of them fit for a terminal.

    Raises:
        ArtifactRejected: a reply that is no such listing.
    """
    try:
        rows = [
            {name: plain(_text(row[name])) for name in _TEXTS}
            | {"models": [plain(_text(model)) for model in row["models"]], "count": _number(row["count"])}
            | {"reasons": {plain(reason): _number(count) for reason, count in row["reasons"].items()}}
            for row in page["misses"]
        ]
        _number(page["total"])
    except (TypeError, KeyError, AttributeError):
        raise ArtifactRejected(f"{url} sent no list of misses; is it an mlaprep service of this release?") from None
    return rows


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _number(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError
    return value


def _table(rows: Sequence[Mapping[str, Any]], *, narrow: bool) -> Table:
    table = Table(box=SIMPLE_HEAD, header_style="bold", show_edge=False, pad_edge=False, collapse_padding=True)
    table.add_column(f"variant ({VARIANT_PREFIX}…)" if narrow else "variant", no_wrap=True)
    table.add_column("arch", min_width=7, no_wrap=True)
    table.add_column("times", justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    if not narrow:
        table.add_column("reasons", no_wrap=True)
    table.add_column("last seen", no_wrap=True)
    for row in rows:
        name = row["variant_id"].removeprefix(VARIANT_PREFIX) if narrow else row["variant_id"]
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in row["reasons"].items())
        state = Text(row["state"], style=_STATE_STYLES.get(row["state"], ""))
        last = row["last_seen"][5:16].replace("T", " ") if narrow else row["last_seen"]
        cells = [Text(name, style="bold"), Text(row["arch"], style="cyan"), Text(f"{row['count']:,}"), state]
        table.add_row(*cells, *([] if narrow else [Text(reasons)]), Text(last))
    return table
