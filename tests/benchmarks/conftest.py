"""The benchmarks are scripts: their modules import each other by bare name, and so do the helpers here."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "benchmarks"), str(Path(__file__).resolve().parent)]
