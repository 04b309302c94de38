"""Pages: the dashboard's templates, and how values read in them."""

import functools
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import jinja2

from mlaprep.service.web.assets import assets

_TEMPLATES: Final = Path(__file__).parent / "templates"
_STEPS: Final = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def render_page(name: str, **values: Any) -> str:
    """A page as HTML; everything that is put into it is escaped."""
    return _environment().get_template(f"{name}.html.j2").render(**values)


def with_query(path: str, values: Mapping[str, Any], **changes: Any) -> str:
    """A path with a query string of all values that are not None; ``changes`` come in place of ``values``."""
    query = {name: value for name, value in {**values, **changes}.items() if value is not None}
    return f"{path}?{urlencode(query)}" if query else path


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "size": size,
        "number": number,
        "ago": ago,
        "duration": duration,
        "instant": instant,
    }
    environment.globals |= {"asset": {name: asset.url for name, asset in assets().items()}, "with_query": with_query}
    return environment


def size(count: int) -> str:
    """Bytes in the largest unit that keeps a digit before the point: ``9.2 KiB``."""
    if count < 1024:
        return f"{count} B"
    power = min(3, (count.bit_length() - 1) // 10)
    return f"{count / 1024**power:.1f} {('KiB', 'MiB', 'GiB')[power - 1]}"


def number(count: int) -> str:
    """An integer with its thousands set apart."""
    return f"{count:,}"


def duration(seconds: float) -> str:
    """A span in its two largest units: ``3 min 12 s``."""
    left, parts = round(seconds), []
    for unit, word in _STEPS:
        if left >= unit:
            parts.append(f"{left // unit} {word}")
            left %= unit
        if len(parts) == 2:
            break
    return " ".join(parts) or "0 s"


def ago(moment: float | str) -> str:
    """How long ago something was, in its largest unit."""
    passed = max(0, round(time.time() - _seconds(moment)))
    unit, word = next((step for step in _STEPS if passed >= step[0]), (1, "s"))
    return "just now" if passed < 5 else f"{passed // unit} {word} ago"


def instant(moment: float | str) -> str:
    """UTC to the second, as RFC 3339 has it."""
    return datetime.fromtimestamp(_seconds(moment), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _seconds(moment: float | str) -> float:
    return datetime.fromisoformat(moment).timestamp() if isinstance(moment, str) else moment
