"""A process made to die: it computes the samples of one range, each alone, and says which one it has in hand.

Started by ``worker.extraction.isolation``. One JSON object a line goes to a pipe: ``{"row": 17}`` before that sample is computed,
``{"end": ..., "text": ...}`` at an end that is none of the range's doing. Silence and an exit is a death. The range is
committed by this process, in the name of the worker that started it.
"""

import json
import os
from dataclasses import replace
from typing import Any

import numpy as np

from swathe.parent import die_with_parent
from swathe.settings import Settings
from swathe.spec import Quarantined, from_json
from worker.extraction.extraction import Extraction
from worker.extraction.isolation import Trial
from worker.extraction.steps import Computed, Prepared
from worker.loop.contract import STORED
from worker.loop.faults import classify
from worker.serve import device_of
from worker.telemetry.totals import Telemetry


def attempt(settings: Settings, text: str, *, events: int, parent: int) -> int:
    """Do one trial; returns the exit status."""
    die_with_parent(parent)
    trial = from_json(Trial, text, origin="trial")

    def tell(event: dict[str, Any]) -> None:
        os.write(events, json.dumps(event).encode() + b"\n")

    work = Extraction(
        name=trial.worker,
        device=device_of(trial.device),
        device_id=trial.device,
        settings=settings,
        telemetry=Telemetry(),
        patient=False,  # silence is taken for a hang here: a full store sends the range back instead
    )
    try:
        _compute(work, trial, tell)
    except Exception as error:  # noqa: BLE001 - told to who started us
        kind = classify(error)
        # What breaks the device is the death that this process was made for.
        tell(
            {
                "end": "died" if kind == "worker" else kind,
                "text": f"{type(error).__name__}: {error}",
            }
        )
        return 1
    tell({"end": "done"})
    return 0


def _compute(work: Extraction, trial: Trial, tell: Any) -> None:
    prepared = work.prepare(trial.job)
    if prepared is STORED or not isinstance(prepared, Prepared):
        return
    tokens = prepared.tokens
    guilty = {sample.row for sample in trial.guilty}
    rows = (
        [trial.only]
        if trial.only is not None
        else [int(row) for row in tokens.rows if row not in guilty]
    )
    samples = tokens.keep(np.flatnonzero(np.isin(tokens.rows, rows)).tolist())
    computed = work.compute_alone(
        replace(prepared, tokens=samples), lambda index: tell({"row": int(samples.rows[index])})
    )
    if trial.only is None and isinstance(computed, Computed):
        # ``computed`` stays alive here: its host buffer goes back with it.
        work.publish(_with(computed, trial.guilty))


def _with(computed: Computed, guilty: tuple[Quarantined, ...]) -> Computed:
    every = sorted((*computed.states.quarantined, *guilty), key=lambda sample: sample.row)
    return replace(computed, states=replace(computed.states, quarantined=tuple(every)))
