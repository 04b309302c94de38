"""Named clients: how an operation's schema, which holds no objects, says which client it asks."""

import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mlaprep.clients.client import KernelClient

_clients: Final[dict[str, "KernelClient"]] = {}
_naming: Final = threading.Lock()


def name_client(name: str, client: "KernelClient") -> str:
    """Let operations ask ``client`` by ``name``, from every thread of this process; returns the name.

    Names live in a process and in the forks of it. A process that loads a compiled graph from a cache gives
    the same names before it runs the graph.

    Raises:
        TypeError: a name that is no string, or an object that is no client.
        ValueError: an empty name, or one that stands for another client; :func:`forget_client` frees it.
    """
    if type(name) is not str:
        raise TypeError(f"name is a {type(name).__name__}; give a string")
    if not callable(getattr(client, "serving_handle", None)):
        raise TypeError(f"client is a {type(client).__name__}; give a KernelClient")
    if not name:
        raise ValueError("name is empty; give one or more characters")
    with _naming:
        if _clients.setdefault(name, client) is not client:
            raise ValueError(
                f"asked to name a client {name!r}, found another client of that name; "
                "choose another, or call forget_client first"
            )
    return name


def forget_client(name: str) -> None:
    """Free a name; compiled graphs that hold it raise ValueError until it is given again."""
    with _naming:
        _clients.pop(name, None)


def named_client(name: str | None) -> "KernelClient | None":
    """The client of that name; None, the default client, for no name.

    Raises:
        ValueError: no client has that name in this process.
    """
    if name is None:
        return None
    try:
        return _clients[name]
    except KeyError:
        known = ", ".join(sorted(_clients)) or "none"
        raise ValueError(
            f"client: asked for the one named {name!r}, found {known} in this process; "
            "call name_client(name, client) before the graph runs"
        ) from None
