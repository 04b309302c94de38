"""The commands that take kernels out of use, and show which are."""

from collections.abc import Sequence
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from mlaprep.clients.cli_options import CacheDir, Json, Token, Url, existing_store, full_variant_id, open_store
from mlaprep.clients.cli_output import FULL_TABLE_WIDTH, VARIANT_PREFIX, print_json, reports_errors, stderr, stdout
from mlaprep.clients.client import offline_by_environment
from mlaprep.clients.errors import ArtifactRejected, FieldProblem, KernelUnavailable, SpecError
from mlaprep.clients.replies import plain
from mlaprep.clients.rest import RestTransport
from mlaprep.kernels_cache.key import is_digest
from mlaprep.kernels_cache.opening import folder_of
from mlaprep.kernels_cache.revocation import MAX_REASON, Revocation, Revocations, is_reason
from mlaprep.kernels_cache.store import is_prefix, only_key
from mlaprep.templates.arch import Arch
from mlaprep.templates.spec import KernelSpec, parse_variant_id


@reports_errors
def revoke(
    variant: Annotated[str, typer.Argument(metavar="VARIANT", help="The kernel's variant id.")],
    archs: Annotated[list[str], typer.Option("--arch", metavar="ARCH", help="Target. May be repeated.")],
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why, for whoever meets the refusal.")],
    key: Annotated[
        str | None, typer.Option("--key", metavar="KEY", help="Another build of the variant, by its whole key.")
    ] = None,
    url: Url = None,
    token: Token = None,
    cache_dir: CacheDir = None,
    as_json: Json = False,
) -> None:
    """Take a kernel out of use: it is removed, refused by workers and not built again under its key.

    Asks the service of --url or MLAPREP_URL; with neither, the cache of this machine.
    """
    spec, targets = parse_variant_id(full_variant_id(variant)), [Arch(name) for name in archs]
    if not is_reason(reason):
        raise SpecError(FieldProblem("reason", "a text that is no reason", f"1 to {MAX_REASON} printable characters"))
    _require_key(key)
    revoked = (
        _revoke_there(url, token, spec, targets, reason, key)
        if url
        else _revoke_here(cache_dir, spec, targets, reason, key)
    )
    if as_json:
        print_json({"revocations": [each.to_dict() for each in revoked]})
    else:
        stdout().print(_table(revoked))


@reports_errors
def revocations(
    lift: Annotated[
        str | None,
        typer.Option("--lift", metavar="KEY", help="Let the kernel of this key be used again; 8 digits or more of it."),
    ] = None,
    url: Url = None,
    token: Token = None,
    cache_dir: CacheDir = None,
    as_json: Json = False,
) -> None:
    """List the kernels that are revoked, in a service or in this machine's cache, or lift one revocation."""
    if lift is not None and not (len(lift) >= 8 and is_prefix(lift)):
        raise SpecError(FieldProblem("lift", "a string that is no key", "8 to 64 lower-case hexadecimal digits"))
    if url:
        transport = _transport(url, token)
        try:
            found = _read(transport.document("/v1/revocations"), transport.url)
            if lift is not None:
                found = [_chosen(found, lift)]
                transport.send("DELETE", f"/v1/revocations/{found[0].key}")
        finally:
            transport.close()
    else:
        known = Revocations(None if (store := existing_store(cache_dir)) is None else store.root)
        found = list(known.list())
        if lift is not None:
            found = [_chosen(found, lift)]
            known.lift(found[0].key)
    if as_json:
        print_json({"lifted" if lift is not None else "revocations": [each.to_dict() for each in found]})
    elif found:
        stdout().print(_table(found))
    else:
        stderr().print(Text("No kernel is revoked."))


def _revoke_there(
    url: str, token: str | None, spec: KernelSpec, archs: Sequence[Arch], reason: str, key: str | None
) -> list[Revocation]:
    transport = _transport(url, token)
    query = f"?reason={quote(reason, safe='')}" + (f"&key={key}" if key else "")
    try:
        replies = [transport.send("DELETE", f"/v1/kernels/{arch}/{spec.variant_id}{query}") for arch in archs]
        return _read([reply.get("revocation") if isinstance(reply, dict) else None for reply in replies], url)
    finally:
        transport.close()


def _revoke_here(
    cache_dir: str | None, spec: KernelSpec, archs: Sequence[Arch], reason: str, key: str | None
) -> list[Revocation]:
    from mlaprep.service.builder import Builder
    from mlaprep.service.revoking import revoke as revoke_in

    store = open_store(cache_dir)
    if folder_of(store) is None:
        raise KernelUnavailable("there is no cache directory on this machine that could remember a revocation")
    found = []
    with Builder(store) as builder:
        for arch in archs:
            revoked = revoke_in(builder, spec, arch, reason, key)
            if revoked is None:
                raise KernelUnavailable(
                    f"{spec.variant_id} for {arch} is not in the cache of this machine; `mlaprep ls` lists what is, "
                    "and --url revokes it in a service",
                    variant_id=spec.variant_id,
                    arch=str(arch),
                )
            found.append(revoked)
    return found


def _chosen(found: Sequence[Revocation], prefix: str) -> Revocation:
    """The one whose key starts so. Raises AmbiguousKeyError or KernelUnavailable."""
    key = only_key(prefix, (each.key for each in found if each.key.startswith(prefix)))
    if key is None:
        raise KernelUnavailable("no kernel whose key starts so is revoked; `mlaprep revocations` lists those that are")
    return next(each for each in found if each.key == key)


def _transport(url: str, token: str | None) -> RestTransport:
    if offline_by_environment():
        raise KernelUnavailable("offline (MLAPREP_OFFLINE), so no service was asked")
    return RestTransport(url, token)


def _require_key(key: str | None) -> None:
    if key is not None and not is_digest(key):
        raise SpecError(FieldProblem("key", "a string that is no key", "64 lower-case hexadecimal digits"))


def _read(reply: Any, url: str) -> list[Revocation]:
    documents: Any = reply.get("revocations") if isinstance(reply, dict) else reply
    try:
        return [Revocation.from_dict(document, url) for document in documents]
    except (TypeError, ValueError):
        raise ArtifactRejected(f"{url} sent no list of revocations; is it an mlaprep service?") from None


def _table(found: Sequence[Revocation]) -> Table:
    narrow = stdout().width < FULL_TABLE_WIDTH
    table = Table(box=SIMPLE_HEAD, header_style="bold", show_edge=False, pad_edge=False, collapse_padding=True)
    table.add_column(f"variant ({VARIANT_PREFIX}…)", no_wrap=True)
    table.add_column("arch", min_width=7, no_wrap=True, style="cyan")
    table.add_column("key", no_wrap=True)
    table.add_column("since", no_wrap=True)
    table.add_column("reason", overflow="fold")
    for each in found:
        since = each.revoked_at[5:16].replace("T", " ") if narrow else each.revoked_at
        name = Text(each.variant_id.removeprefix(VARIANT_PREFIX))
        table.add_row(name, each.arch, each.key[:12], since, Text(plain(each.reason)))
    return table
