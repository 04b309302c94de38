"""QueuedJobs: warm-up jobs of all replicas on one Redis, run by whoever runs ``mlaprep worker``."""

import dataclasses
import time
from typing import Final

from mlaprep.kernels_cache.redis_link import RedisLink
from mlaprep.service.errors import TooManyJobs
from mlaprep.service.job_store import WarmupJob
from mlaprep.service.jobs import MAX_WAITING, all_there, new_job, once_more
from mlaprep.service.markers import Markers
from mlaprep.service.redis_jobs import RedisJobs
from mlaprep.service.rq_queue import enqueue, rq_package
from mlaprep.templates.plans import WarmupPlan, parse_plan


class QueuedJobs:
    """As :class:`mlaprep.service.jobs.Jobs`, with nothing run in this process.

    Raises:
        StoreError: RQ is not installed; later, from each call, Redis is in trouble.
    """

    def __init__(self, link: RedisLink, markers: Markers) -> None:
        rq_package()
        self._link = link
        self._markers = markers
        self.store: Final = RedisJobs(link)

    def submit(self, plan: WarmupPlan) -> tuple[WarmupJob, bool]:
        """A job for a plan, and whether it is new: an equal plan that is not finished is joined.

        Raises:
            TooManyJobs: nothing was started.
            StoreError: Redis is in trouble.
        """
        if self._markers.holds(plan):
            return self.store.put(all_there(new_job(plan))), True
        self._require_room()
        job, is_new = self.store.join_or_add(new_job(plan))
        if is_new:
            self._link.run(enqueue, job.id)
        return self.store.get(job.id) or job, is_new

    def resume(self, job: WarmupJob) -> WarmupJob:
        """Run a job that was interrupted, cancelled or failed once more.

        Raises:
            SpecError: its plan names what this release does not know.
            TooManyJobs, StoreError: nothing was started.
        """
        parse_plan(job.plan)
        self._require_room()
        self.store.may_go_on(job.id)
        job = self.store.put(once_more(job))
        self._link.run(enqueue, job.id)
        return self.store.get(job.id) or job

    def cancel(self, job: WarmupJob) -> WarmupJob:
        """Have a job stop, wherever it runs; kernels that are being compiled are finished."""
        self.store.ask_to_stop(job.id)
        if job.state == "queued":
            return self.store.put(dataclasses.replace(job, state="cancelled", finished_at=time.time()))
        return job

    def close(self) -> None:
        """Nothing runs here."""

    def _require_room(self) -> None:
        if sum(job.state == "queued" for job in self.store.list()) >= MAX_WAITING:
            raise TooManyJobs(MAX_WAITING)
