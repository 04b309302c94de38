"""The command that runs warm-up jobs of a fleet."""

import os
import sys
from typing import Annotated

import typer

from mlaprep.clients.cli_config import ConfigOption, use_config
from mlaprep.clients.cli_options import CacheDir, Json
from mlaprep.clients.cli_output import print_json, reports_errors
from mlaprep.clients.errors import KernelUnavailable
from mlaprep.kernels_cache.errors import StoreError


@reports_errors
def worker(
    cache_dir: CacheDir = None,
    config: ConfigOption = None,
    burst: Annotated[bool, typer.Option("--burst", help="End once no job waits.")] = False,
    as_json: Json = False,
) -> None:
    """Run warm-up jobs of the service's replicas until SIGTERM or Ctrl-C. Needs MLAPREP_REDIS_URL, theirs.

    Any number of these, on any machines. A job in hand goes back into the queue when its worker is stopped.
    """
    try:
        from mlaprep.service.logs import set_up_logs
        from mlaprep.service.settings import read_settings
        from mlaprep.service.worker import work
    except ModuleNotFoundError as error:
        if str(error.name).startswith("mlaprep"):
            raise
        raise KernelUnavailable(
            f"cannot work: {error.name} is not installed; install mlaprep[service,cuda12,redis]"
        ) from None
    use_config(config)
    settings = read_settings({} if cache_dir is None else {"cache_dir": cache_dir})
    set_up_logs(settings.log_format, settings.log_level, access_log=False)
    if as_json:
        print_json({"pid": os.getpid()})
        sys.stdout.flush()
    try:
        work(settings, burst=burst)
    except StoreError as error:
        raise KernelUnavailable(f"cannot work: {error}") from None
