"""Release: the version of this installation."""

from importlib.metadata import PackageNotFoundError, version


def release_version() -> str:
    """As its metadata has it; "0" where it runs without being installed."""
    try:
        return version("mlaprep")
    except PackageNotFoundError:
        return "0"
