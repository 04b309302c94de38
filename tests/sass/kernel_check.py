"""What a change to a template does, in seconds and without a GPU. `make kernel-check`.

Renders and compiles a set of kernels, holds their machine code to the checks of this folder, and shows registers,
code size and machine code beside the last saved run; meanwhile the bytes of the generated source are tried on the
CPU. Exits with 1 where a kernel does not compile, a check finds a fault, or a byte is wrong.

    make kernel-check                          # the first run is saved
    make kernel-check ARGS=--save              # from now on compare with this one
    make kernel-check ARGS='--kind neox --arch sm_90a --lines 0'
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import jinja2
from sass.checks import faults
from sass.kernels import Kernel, build
from sass.variants import KINDS, kind, targets

from mlaprep.clients.cli_kernels import write_artifact
from mlaprep.clients.saved import read_build
from mlaprep.kernels_cache.errors import ArtifactError
from mlaprep.service.compiler import Compiler
from mlaprep.service.inspect import Difference, Inspection, diff, inspect_all
from mlaprep.templates.arch import Arch
from mlaprep.templates.errors import MlaprepError
from mlaprep.templates.render import render

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".cache" / "kernel-check"
SHOWN = ("plain", "everything", "interleaved", "neox", "q16", "same", "ds_mla-raw", "8-elements", "32-byte-loads")
ARCHS = ("sm_90a", "sm_100a", "sm_120a")
FIGURES = {"registers": 17, "code_bytes": 24, "instructions": 22}
"""What is shown of each kernel, and the columns it takes where it changed."""

BYTES = ["-m", "not gpu", "-k", "every_input_pattern and bf16", str(ROOT / "tests" / "kernel")]
"""The tests of bytes that a change breaks first: every pattern of bf16 through each layout, rotation and scale."""

Say = Callable[[str], None]


def main(arguments: Sequence[str] | None = None, say: Say = print) -> int:
    options = parse(arguments)
    started = time.monotonic()
    trial = None if options.no_bytes else start_bytes()
    try:
        wrong = look(options, say)
        if trial is not None:
            printed, _ = trial.communicate()
            wrong |= trial.returncode != 0
            lines = printed.strip().splitlines()
            say("\n".join(lines if trial.returncode else [f"bytes: {line}" for line in lines[-1:]]))
    finally:
        if trial is not None:
            trial.kill()
            trial.wait()
    say(f"{'WRONG' if wrong else 'ok'}, {time.monotonic() - started:.1f} s")
    return int(wrong)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", action="append", choices=KINDS, metavar="KIND", help="one of tests/sass/variants.py")
    parser.add_argument("--arch", action="append", type=Arch, help=f"default: {' '.join(ARCHS)}")
    parser.add_argument("--save", action="store_true", help="compare later runs with this one")
    parser.add_argument("--lines", type=int, default=40, help="lines of machine code a kernel; 0 shows all")
    parser.add_argument("--no-bytes", action="store_true", help="leave out the bytes")
    parser.add_argument("--folder", type=Path, default=FOLDER, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def start_bytes() -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", *BYTES]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def look(options: argparse.Namespace, say: Say) -> bool:
    """Show every kernel beside the last saved run; whether anything is wrong."""
    archs = options.arch or [Arch(name) for name in ARCHS]
    try:
        named = [
            (name, render(kind(name)), arch)
            for name in options.kind or SHOWN
            for arch in targets(kind(name))
            if arch in archs
        ]
        with Compiler() as compiler:
            kernels = build(compiler, [(source, arch) for _, source, arch in named])
    except (jinja2.TemplateError, MlaprepError) as error:
        say(f"{type(error).__name__}: {error}")
        return True
    before = last_run(options.folder)
    wrong = False
    changed: list[Difference] = []
    for (name, _, arch), kernel in zip(named, kernels, strict=True):
        old = before.get((kernel.inspection.name, arch))
        found = faults(kernel)
        wrong |= bool(found)
        say(f"{name:16} {arch!s:8}" + "".join(figures(kernel.inspection, old)) + f"  {'; '.join(found) or 'ok'}")
        difference = None if old is None else diff(old, kernel.inspection)
        if difference is not None and not difference.empty:
            changed.append(difference)
    for difference in changed:
        say("\n" + "\n".join(described(difference, options.lines)))
    keep(options, kernels, before, changed, say)
    return wrong


def last_run(folder: Path) -> Mapping[tuple[str, Arch], Inspection]:
    """The kernels of the last saved run; none where it cannot be read."""
    try:
        return {(each.name, each.arch): each for each in inspect_all(read_build(folder))}
    except (ArtifactError, OSError):
        return {}


def keep(
    options: argparse.Namespace,
    kernels: Sequence[Kernel],
    before: Mapping[tuple[str, Arch], Inspection],
    changed: Sequence[Difference],
    say: Say,
) -> None:
    """Save the run where that was asked for, or the kernels that no run saved yet."""
    new = [kernel for kernel in kernels if options.save or (kernel.inspection.name, kernel.arch) not in before]
    for kernel in new:
        write_artifact(options.folder, kernel.artifact)
    if not options.save:
        known = len(kernels) - len(new)
        say(f"\n{len(changed)} of {known} kernels changed since the last saved run" if known else "")
    if new:
        say(f"{len(new)} kernels saved for later runs to be compared with")


def figures(now: Inspection, old: Inspection | None) -> Iterator[str]:
    for name, width in FIGURES.items():
        value = now.resources.figures()[name]
        was = value if old is None else old.resources.figures()[name]
        text = f"{value}" if value == was else f"{was} → {value}"
        yield f" {text + ' ' + name.replace('_', ' '):{width}}"


def described(difference: Difference, limit: int) -> Iterator[str]:
    opcodes = [f"{name} {one} → {other}" for name, (one, other) in difference.opcodes.items()]
    yield f"{difference.other}: " + (", ".join(opcodes[:8]) or "the same instructions")
    shown = difference.sass[: limit or None]
    yield from shown
    if len(shown) < len(difference.sass):
        yield f"[{len(difference.sass) - len(shown)} more lines; --lines 0 shows all]"


if __name__ == "__main__":
    sys.exit(main())
