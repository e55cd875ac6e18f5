"""Records come back as they were written; damage of any file is named."""

import hashlib
import json
import struct

import numpy as np
import pytest

from dflash_jax.data.chat import Encoded
from dflash_jax.data.records import COUNTS, LENGTHS, MANIFEST, RECORDS, Records, write_records
from dflash_jax.errors import UserError


def encoded(tokens, mask):
    return Encoded(np.array(tokens, np.int32), np.array(mask, bool))


def rows(count):
    rng = np.random.default_rng(0)
    return [encoded(rng.integers(0, 250_000, n), rng.random(n) < 0.5) for n in rng.integers(1, 200, size=count)]


@pytest.fixture
def written(tmp_path):
    write_records(tmp_path / "data", rows(50), manifest={"source": "c.jsonl"})
    return tmp_path / "data"


def test_roundtrip(written):
    records, expected = Records.open(written), rows(50)
    assert len(records) == 50
    assert records.lengths.dtype == np.int32
    assert records.lengths.tolist() == [len(row.tokens) for row in expected]
    for record_id in (*range(50), 7):
        np.testing.assert_array_equal(records[record_id].tokens, expected[record_id].tokens, strict=True)
        np.testing.assert_array_equal(records[record_id].loss_mask, expected[record_id].loss_mask, strict=True)
    assert sorted(path.name for path in written.iterdir()) == sorted([RECORDS, LENGTHS, COUNTS, MANIFEST])
    assert records.manifest["source"] == "c.jsonl"
    every, supervised = records.token_counts()
    for token in (0, int(expected[3].tokens[0])):
        assert every[token] == sum((row.tokens == token).sum() for row in expected)
        assert supervised[token] == sum((row.tokens[row.loss_mask] == token).sum() for row in expected)


def test_digest_is_over_lengths_and_documented_record_bytes(tmp_path):
    mask = [True, False, False, False, False, False, False, True, True]
    write_records(tmp_path / "a", [encoded([5], [True]), encoded(range(9), mask)], manifest={})
    content = struct.pack("<iiB", 1, 5, 1) + struct.pack("<i9i2B", 9, *range(9), 0b10000001, 1)
    records = Records.open(tmp_path / "a")
    assert records.digest == hashlib.sha256(content).hexdigest()
    assert (records.manifest["records"], records.manifest["tokens"]) == (2, 10)


def test_failed_write_leaves_nothing_behind(tmp_path):
    def failing():
        yield from rows(3)
        raise UserError("line 4 is bad")

    with pytest.raises(UserError, match="line 4"):
        write_records(tmp_path / "data", failing(), manifest={})
    with pytest.raises(UserError, match="no records to write"):
        write_records(tmp_path / "data", [], manifest={})
    assert list(tmp_path.iterdir()) == []


def test_existing_folder_is_kept(written):
    before = (written / MANIFEST).read_bytes()
    with pytest.raises(UserError, match="exists already"):
        write_records(written, rows(1), manifest={})
    assert (written / MANIFEST).read_bytes() == before


@pytest.mark.parametrize("name", [RECORDS, LENGTHS, MANIFEST])
def test_missing_and_half_files_are_refused(written, name):
    content = (written / name).read_bytes()
    (written / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match="is damaged"):
        Records.open(written)
    (written / name).unlink()
    with pytest.raises(UserError, match=f"lacks {name}"):
        Records.open(written)


def test_disagreeing_lengths_are_refused(written):
    lengths = np.load(written / LENGTHS)
    np.save(written / LENGTHS, lengths[:-1])
    with pytest.raises(UserError, match=r"holds 50 records, lengths.npy 49 lengths"):
        Records.open(written)
    np.save(written / LENGTHS, lengths[::-1])  # same count and sum: only reading can tell
    with pytest.raises(UserError, match=r"record 0 has .* bytes for .* tokens"):
        Records.open(written)[0]


def test_manifest_without_totals_is_refused(written):
    (written / MANIFEST).write_text(json.dumps({"source": "c.jsonl"}))
    with pytest.raises(UserError, match="KeyError"):
        Records.open(written)


def test_flipped_bytes_are_found_when_read(written):
    content = bytearray((written / RECORDS).read_bytes())
    content[9_000:9_008] = bytes(8)
    (written / RECORDS).write_bytes(content)
    records = Records.open(written)
    with pytest.raises(UserError, match=r"is damaged: record \d+ is unreadable"):
        list(map(records.__getitem__, range(50)))
