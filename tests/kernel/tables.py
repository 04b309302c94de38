"""The layout table in C, for tests of it."""

import pytest

from mlaprep.clients.layouts import LayoutTable, PlainLayoutTable, open_layout_table


def native_table() -> LayoutTable:
    """An empty one. Skips where the extension was not built; under CI that is a failure."""
    table = open_layout_table(environ={})
    if isinstance(table, PlainLayoutTable):
        pytest.skip("the extension mlaprep.clients._layouts was not built: install a C compiler and mlaprep again")
    return table
