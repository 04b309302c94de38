"""A container's file system is read-only and its user may have no home: compiling needs neither."""

import subprocess
import sys

from mlaprep.service.child import child_environment


def test_compiler_loads_without_a_home_and_makes_no_directory() -> None:
    code = """
import os, sys
sys.addaudithook(lambda event, arguments: os._exit(3) if event == "os.mkdir" else None)
from cupy.cuda import nvrtc
print(nvrtc.getVersion())
"""
    environ = child_environment() | {"HOME": "/nonexistent"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("(12, ") or done.stdout.startswith("(13, ")
