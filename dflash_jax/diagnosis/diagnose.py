"""Everything that is wrong with a run, as its log tells it."""

import numpy as np

from dflash_jax.diagnosis.accuracy import read_accuracy
from dflash_jax.diagnosis.bad_steps import read_not_finite, read_skipped
from dflash_jax.diagnosis.buckets import read_modes, read_runs
from dflash_jax.diagnosis.facts import Facts, gather
from dflash_jax.diagnosis.findings import Diagnosis, together
from dflash_jax.diagnosis.gaps import read_step_gaps, read_time_gaps
from dflash_jax.diagnosis.jumps import read_jumps, read_spikes
from dflash_jax.diagnosis.plateau import read_plateau
from dflash_jax.diagnosis.queues import read_queues
from dflash_jax.diagnosis.reading import Log
from dflash_jax.diagnosis.schedules import read_warm_up
from dflash_jax.diagnosis.throughput import read_rates

READINGS = (
    read_not_finite,
    read_skipped,
    read_jumps,
    read_spikes,
    read_accuracy,
    read_step_gaps,
    read_time_gaps,
    read_modes,
    read_runs,
    read_queues,
    read_warm_up,
    read_plateau,
    read_rates,
)


def diagnose(log: Log) -> Diagnosis:
    """All findings of a log, with notes and what the log cannot tell."""
    facts = gather(log)
    return together([*(read(facts) for read in READINGS), _restarts(facts)])


def _restarts(facts: Facts) -> Diagnosis:
    rows = np.flatnonzero(np.diff(facts.processes)) + 1
    steps = ", ".join(str(facts.log.steps[row]) for row in rows)
    return Diagnosis(notes=[f"resumed: elapsed_s begins anew at step {steps}"] if steps else [])
