"""Freshness: whether a stored kernel is what this release would build."""

from mlaprep.kernels_cache.artifact import Manifest
from mlaprep.templates.errors import SpecError
from mlaprep.templates.render import render
from mlaprep.templates.spec import KernelSpec


def is_current(manifest: Manifest) -> bool:
    """Whether today's templates render the source this kernel was compiled from.

    A stale kernel is found under its key and its digest, and by nobody who asks for its variant.

    Raises:
        TemplateError: the templates do not render.
    """
    try:
        return render(KernelSpec.from_dict(manifest.spec)).sha256 == manifest.source_sha256
    except SpecError:  # a specification of another release
        return False
