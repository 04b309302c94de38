"""A compiler for the machine code tests, which need nvdisasm and no GPU."""

from collections.abc import Iterator

import pytest

from mlaprep.service.compiler import Compiler
from mlaprep.service.disassembler import find_nvdisasm
from mlaprep.service.errors import BuildError, DisassemblerUnavailable


@pytest.fixture(scope="session")
def compiler() -> Iterator[Compiler]:
    try:
        find_nvdisasm()
    except DisassemblerUnavailable as error:
        pytest.skip(str(error))
    with Compiler() as pool:
        try:
            pool.toolchain()
        except BuildError as error:
            pytest.skip(str(error))
        yield pool
