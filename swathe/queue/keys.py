"""The Redis keys of one queue: rq's own, spelled as rq 3.0 spells them, and ours beside them."""

from dataclasses import dataclass

from rq.defaults import RQ_KEY_PREFIX

from swathe import names


@dataclass(frozen=True, slots=True)
class QueueKeys:
    """Every script gets the same keys in the same order; ``scripts.py`` says which is which."""

    queue: str

    @property
    def waiting(self) -> str:
        """Rq's list of queued job ids."""
        return f"{RQ_KEY_PREFIX}:queue:{self.queue}"

    @property
    def intermediate(self) -> str:
        """Rq's list of ids between pop and registration; only foreign workers put any there."""
        return f"{self.waiting}:intermediate"

    @property
    def running(self) -> str:
        """Rq's StartedJobRegistry."""
        return f"{RQ_KEY_PREFIX}:wip:{self.queue}"

    @property
    def failed(self) -> str:
        """Rq's FailedJobRegistry; holds refused jobs only."""
        return f"{RQ_KEY_PREFIX}:failed:{self.queue}"

    @property
    def parked(self) -> str:
        """Our list of ids of paused runs."""
        return names.parked_key(self.queue)

    def for_script(self) -> list[str]:
        """KEYS[1..13] of every script."""
        return [
            self.waiting,
            self.intermediate,
            self.running,
            self.failed,
            names.leases_key(self.queue),
            self.parked,
            names.strays_key(self.queue),
            names.clock_key(),
            names.requeued_key(),
            names.paused_key(),
            names.queues_key(),
            f"{RQ_KEY_PREFIX}:queues",
            names.cancelled_key(),
        ]
