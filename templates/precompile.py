"""precompile: the templates as Python, so that a process which renders need not parse them.

``python -m mlaprep.templates.precompile`` writes ``compiled.py``. It is used while it was made from the templates
and the jinja2 that are there; otherwise rendering parses them, which costs some 50 ms once a process.
"""

import textwrap
from pathlib import Path
from typing import Final

import jinja2

from mlaprep.templates.render import new_environment, templates_fingerprint

COMPILED: Final = Path(__file__).with_name("compiled.py")

_HEAD: Final = '''\
"""The templates as Python, written by mlaprep.templates.precompile: do not edit, run it."""

from typing import Any

FINGERPRINT = "{fingerprint}"
TEMPLATES: dict[str, Any] = {{}}
'''
_PART: Final = """

def {function}(environment):
{body}
    return {{"__file__": "{name}", "name": name, "root": root, "blocks": blocks, "debug_info": debug_info}}


TEMPLATES["{name}"] = {function}
"""


def compiled_text() -> str:
    """The text of ``compiled.py`` for the templates that are there, and this jinja2."""
    environment = new_environment(jinja2.DictLoader({}))
    parts = [_HEAD.format(fingerprint=templates_fingerprint())]
    for path in sorted(COMPILED.parent.glob("*.j2")):
        name = path.name
        python = environment.compile(path.read_text("utf-8"), name, name, raw=True, defer_init=True)
        function = "_" + name.replace(".", "_")
        parts.append(_PART.format(function=function, name=name, body=textwrap.indent(python.strip(), "    ")))
    return "".join(parts)


if __name__ == "__main__":
    COMPILED.write_text(compiled_text(), "utf-8")
