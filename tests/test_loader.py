"""Batches hold what the records hold, and continue exactly wherever a run stopped."""

import dataclasses

import grain
import numpy as np
import pytest
import tiny_records

from dflash_jax.batches.loader import HostShare, Reading, batch_dataset, batches
from dflash_jax.batches.plan import BatchPlan
from dflash_jax.chat.chat import Encoded
from dflash_jax.errors import UserError

EDGES, ROWS = (8, 16), (4, 2)


def row(record_id):
    """Record r has 1 + 3r mod 16 tokens 100r+1, 100r+2, ..; every third one is not trained."""
    places = np.arange(1 + 3 * record_id % 16)
    return Encoded((100 * record_id + 1 + places).astype(np.int32), places % 3 > 0)


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    directory = tmp_path_factory.mktemp("loader") / "data"
    return tiny_records.write(directory, map(row, range(23)))


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
        for at, (record_id,) in enumerate(batch.record_ids):
            n = 1 + 3 * record_id % 16 if record_id >= 0 else 0
            pad = [0] * (width - n)
            assert batch.tokens[at].tolist() == [100 * record_id + 1 + i for i in range(n)] + pad
            assert batch.positions[at].tolist() == list(range(n)) + pad
            assert batch.segment_ids[at].tolist() == [1] * n + pad
            assert batch.loss_mask[at].tolist() == [i % 3 > 0 for i in range(n)] + [False] * len(pad)
            seen.append(int(record_id))
    assert sorted(id for id in seen if id >= 0) == sorted([*range(23)] * 2)
    assert -1 in seen


@pytest.mark.parametrize(("threads", "ahead"), [(2, 2**20), (4, 0)])
@pytest.mark.parametrize("batching", ["bucketed", "packed"])
def test_resume_at_every_position_gives_the_remaining_batches(records, threads, ahead, batching):
    plan = BatchPlan(records.lengths, edges=EDGES, rows=ROWS, seed=3, epochs=2, batching=batching)
    reading = Reading(threads=threads, ahead_bytes=ahead)
    whole = [as_lists(batch) for batch, _ in batches(records, plan, start=0, reading=reading)]
    assert len(whole) == len(plan)
    for stop in range(len(plan) + 1):
        first, cursor = batches(records, plan, start=0, reading=reading), 0
        for _ in range(stop):
            _, cursor = next(first)
        first.close()
        rest = [as_lists(batch) for batch, _ in batches(records, plan, start=cursor, reading=reading)]
        assert rest == whole[stop:]


def test_grain_finds_the_state_exact(records, plan):
    dataset = batch_dataset(records, plan, Reading()).map(dataclasses.asdict)
    grain.experimental.assert_equal_output_after_checkpoint(dataset)


@pytest.mark.parametrize("before", [1, 2])
@pytest.mark.parametrize("after", [1, 2])
def test_hosts_share_the_rows_of_every_batch_and_their_number_may_change(records, plan, before, after):
    def joined(count, start, stop):
        parts = [
            batches(records, plan, start=start, reading=Reading(share=HostShare(index, count)))
            for index in range(count)
        ]
        found = []
        for shares in zip(*parts, strict=True):
            assert len({cursor for _, cursor in shares}) == 1
            whole = {
                name: np.concatenate([getattr(batch, name) for batch, _ in shares]).tolist()
                for name in vars(shares[0][0])
            }
            found.append((whole, shares[0][1]))
            if shares[0][1] == stop:
                break
        for part in parts:
            part.close()
        return found

    expected = [(as_lists(batch), cursor) for batch, cursor in batches(records, plan, start=0)]
    stop = len(plan) // 2
    assert joined(before, 0, stop) + joined(after, stop, len(plan)) == expected


def test_rows_that_do_not_divide_over_hosts_are_refused():
    with pytest.raises(UserError, match="7 rows of a batch do not divide over 2 hosts"):
        HostShare(0, 2).of(7)


def test_packed_rows_hold_their_records_one_behind_the_other(records):
    plan = BatchPlan(records.lengths, edges=EDGES, rows=ROWS, seed=3, epochs=1, batching="packed")
    seen = []
    for batch, _ in batches(records, plan, start=0):
        assert batch.tokens.shape == (2, 16)
        for at, contents in enumerate(batch.record_ids):
            expected = [row(int(id)) for id in contents if id >= 0]
            seen += [int(id) for id in contents if id >= 0]
            pad = [0] * (16 - sum(len(record.tokens) for record in expected))
            assert batch.tokens[at].tolist() == [t for record in expected for t in record.tokens] + pad
            assert batch.loss_mask[at].tolist() == [m for record in expected for m in record.loss_mask] + pad
            assert batch.positions[at].tolist() == [p for r in expected for p in range(len(r.tokens))] + pad
            segments = [s for s, record in enumerate(expected, start=1) for _ in record.tokens]
            assert batch.segment_ids[at].tolist() == segments + pad
    assert sorted(seen) == list(range(23))


def test_what_is_read_ahead_is_bounded_in_bytes(plan):
    # The largest batch has 4 x 8 = 2 x 16 tokens of 13 bytes.
    assert Reading(ahead_bytes=5 * 32 * 13).batches_ahead(plan) == 5
    assert Reading(ahead_bytes=5 * 32 * 13 - 1).batches_ahead(plan) == 4
    assert Reading(ahead_bytes=0).batches_ahead(plan) == 1
    assert Reading(ahead_bytes=5 * 32 * 13, share=HostShare(0, 2)).batches_ahead(plan) == 10
