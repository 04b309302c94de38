"""sglang's own plugin loader finds the hook by its entry point, and takes it only where ``MLAPREP_SGLANG`` is on.

python tests/sglang_backend/check_plugin.py [--site DIR]
"""

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROCESS = """
import logging, sys
from pathlib import Path
logging.basicConfig(level=logging.WARNING)
sys.path[:0] = [{metadata!r}, {here!r}, *{site!r}]
import absent
absent.stand_in(*[Path(site) for site in {site!r}])
from sglang.srt.plugins import load_plugins
load_plugins()
early = [name for name in sys.modules if name.endswith("_mla_backend")]
from sglang.srt.layers.attention.cutedsl_mla_backend import CuteDslMLABackend
from sglang.srt.layers.attention.trtllm_mla_backend import TRTLLMMLABackend
methods = TRTLLMMLABackend.forward_decode, TRTLLMMLABackend.forward_extend, CuteDslMLABackend.forward_decode
print(early, [hasattr(method, "__wrapped__") for method in methods])
"""


def main() -> int:
    parser = argparse.ArgumentParser(description="Load the hook through sglang's plugin loader.")
    parser.add_argument("--site", type=Path, help="folder that holds the package sglang")
    arguments = parser.parse_args()
    project = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text())["project"]
    failures = 0
    with tempfile.TemporaryDirectory() as metadata:
        # As an installed mlaprep has it.
        folder = Path(metadata) / f"mlaprep-{project['version']}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: mlaprep\nVersion: {project['version']}\n")
        lines = [f"{name} = {value}\n" for name, value in project["entry-points"]["sglang.srt.plugins"].items()]
        (folder / "entry_points.txt").write_text("".join(["[sglang.srt.plugins]\n", *lines]))
        site = [str(arguments.site.resolve())] if arguments.site else []
        code = PROCESS.format(metadata=metadata, here=str(HERE), site=site)
        for switches, expected in (
            ({}, "[] [False, False, False]"),
            ({"MLAPREP_SGLANG": "1"}, "[] [True, True, True]"),
            ({"MLAPREP_SGLANG": "1", "SGLANG_PLUGINS": "mlaprep"}, "[] [True, True, True]"),
            ({"MLAPREP_SGLANG": "1", "SGLANG_PLUGINS": "other"}, "[] [False, False, False]"),
        ):
            done = subprocess.run(
                [sys.executable, "-c", code], env=os.environ | switches, capture_output=True, text=True
            )
            found = (done.stdout.splitlines() or [done.stderr[-2000:]])[-1]
            failures += found != expected
            print("same" if found == expected else f"FAIL: {found}", "plugin", switches or "without a switch", sep="  ")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
