"""Batches hold what the records hold, and continue exactly wherever a run stopped."""

import dataclasses

import grain
import numpy as np
import pytest

from dflash_jax.data.chat import Encoded
from dflash_jax.data.loader import batch_dataset, batches
from dflash_jax.data.plan import BatchPlan
from dflash_jax.data.records import Records, write_records

EDGES, ROWS = (8, 16), (4, 2)


def row(record_id):
    """Record r has 1 + 3r mod 16 tokens 100r+1, 100r+2, ..; every third one is not trained."""
    places = np.arange(1 + 3 * record_id % 16)
    return Encoded((100 * record_id + 1 + places).astype(np.int32), places % 3 > 0)


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    directory = tmp_path_factory.mktemp("loader") / "data"
    write_records(directory, map(row, range(23)), manifest={})
    return Records.open(directory)


@pytest.fixture
def plan(records):
    return BatchPlan(records.lengths, edges=EDGES, rows=ROWS, seed=3, epochs=2)


def as_lists(batch):
    return {name: value.tolist() for name, value in vars(batch).items()}


def test_rows_hold_the_records_and_padding_is_empty(records, plan):
    seen = []
    for index, (batch, cursor) in enumerate(batches(records, plan, start=0)):
        assert cursor == index + 1
        width = EDGES[plan[index].bucket]
        assert batch.tokens.shape == (ROWS[plan[index].bucket], width)
        assert batch.epochs.tolist() == [index // plan.batches_per_epoch] * len(batch.record_ids)
        for name in ("tokens", "positions", "segment_ids", "record_ids", "epochs"):
            assert getattr(batch, name).dtype == np.int32
        for at, record_id in enumerate(batch.record_ids):
            n = 1 + 3 * record_id % 16 if record_id >= 0 else 0
            pad = [0] * (width - n)
            assert batch.tokens[at].tolist() == [100 * record_id + 1 + i for i in range(n)] + pad
            assert batch.positions[at].tolist() == list(range(n)) + pad
            assert batch.segment_ids[at].tolist() == [1] * n + pad
            assert batch.loss_mask[at].tolist() == [i % 3 > 0 for i in range(n)] + [False] * len(pad)
            seen.append(int(record_id))
    assert sorted(id for id in seen if id >= 0) == sorted([*range(23)] * 2)
    assert -1 in seen


@pytest.mark.parametrize(("read_threads", "prefetch"), [(2, 4), (4, 1)])
def test_resume_at_every_position_gives_the_remaining_batches(records, plan, read_threads, prefetch):
    threads = {"read_threads": read_threads, "prefetch": prefetch}
    whole = [as_lists(batch) for batch, _ in batches(records, plan, start=0, **threads)]
    assert len(whole) == len(plan)
    for stop in range(len(plan) + 1):
        first, cursor = batches(records, plan, start=0, **threads), 0
        for _ in range(stop):
            _, cursor = next(first)
        first.close()
        rest = [as_lists(batch) for batch, _ in batches(records, plan, start=cursor, **threads)]
        assert rest == whole[stop:]


def test_grain_finds_the_state_exact(records, plan):
    grain.experimental.assert_equal_output_after_checkpoint(batch_dataset(records, plan).map(dataclasses.asdict))
