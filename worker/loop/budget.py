"""What a range's history asks for: work as usual, care, or to be set aside. Pure arithmetic on its counters.

Errors and deaths have budgets of their own. A spent budget does not end a range: it is computed with care first, so
that only the guilty samples are lost. What care cannot resolve is set aside, until ``swathe retry``.
"""

from dataclasses import dataclass
from typing import Literal

from swathe.queue import Lease
from worker.loop.contract import WorkerOptions

Care = Literal["", "alone", "apart"]
"""How a range is computed: as a batch; each sample alone, in this worker; the same in a process made to die."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """``set_aside`` is the reason why the range must not be tried again, or empty."""

    care: Care = ""
    set_aside: str = ""


def judge(lease: Lease, options: WorkerOptions) -> Verdict:
    """What to do with a range that was just claimed."""
    if lease.deaths >= options.max_deaths + options.max_deaths_apart:
        reason = f"{lease.deaths} processes died with it, the last ones while it was isolated"
        return Verdict(set_aside=reason)
    if lease.bystander_deaths >= options.max_bystander_deaths:
        reason = f"{lease.bystander_deaths} processes died while they held it"
        return Verdict(set_aside=reason)
    if lease.deaths >= options.max_deaths:
        return Verdict(care="apart")
    if lease.failures >= options.max_failures:
        return Verdict(care="alone")
    return Verdict()


def why(care: Care, lease: Lease, failures: int) -> str:
    """Why a range had to be computed with care."""
    if care == "apart":
        return f"{lease.deaths} processes died with it on their device"
    return f"raised {failures} times"
