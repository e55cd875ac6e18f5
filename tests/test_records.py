"""Records come back as they were written, over several shards; damage of any file is named."""

import hashlib
import json
import struct
import threading

import numpy as np
import pytest
import tiny_records

from dflash_jax.chat.chat import Encoded
from dflash_jax.data.records import COUNTS, LENGTHS, MANIFEST, UNUSED, Records, ShardWriter, pack, shard_name
from dflash_jax.errors import UserError

SHARDS = (0, 20, 0, 29, 1)  # records of each


def encoded(tokens, mask):
    return Encoded(np.array(tokens, np.int32), np.array(mask, bool))


def rows(count):
    rng = np.random.default_rng(0)
    return [encoded(rng.integers(0, 250_000, n), rng.random(n) < 0.5) for n in rng.integers(1, 200, size=count)]


@pytest.fixture
def written(tmp_path):
    """Fifty records in three shards, of which the first is split again from what tiny_records wrote."""
    directory = tmp_path / "data"
    tiny_records.write(directory, rows(50), source="c.jsonl")
    manifest = json.loads((directory / MANIFEST).read_text())
    (directory / shard_name(0)).unlink()
    manifest["shards"], rest = [], rows(50)
    for index, count in enumerate(SHARDS):
        writer, taken = ShardWriter(directory / shard_name(index)), [rest.pop(0) for _ in range(count)]
        writer.write(b"".join(map(pack, taken)), lengths=[len(row.tokens) for row in taken])
        digest = writer.close()
        if count:
            manifest["shards"].append({"file": shard_name(index), "records": count, "digest": digest})
    (directory / MANIFEST).write_text(json.dumps(manifest))
    return directory


def test_roundtrip(written):
    records, expected = Records.open(written), rows(50)
    assert len(records) == 50
    assert records.lengths.dtype == np.int32
    assert records.lengths.tolist() == [len(row.tokens) for row in expected]
    for record_id in (*range(50), 7):
        np.testing.assert_array_equal(records[record_id].tokens, expected[record_id].tokens, strict=True)
        np.testing.assert_array_equal(records[record_id].loss_mask, expected[record_id].loss_mask, strict=True)
    for outside in (-1, 50):
        with pytest.raises(IndexError):
            records[outside]
    shards = [shard_name(index) for index in (1, 3, 4)]  # a shard without records has no file
    assert sorted(path.name for path in written.iterdir()) == sorted([*shards, LENGTHS, COUNTS, UNUSED, MANIFEST])
    assert records.manifest["source"] == "c.jsonl"
    every, supervised = records.token_counts()
    for token in (0, int(expected[3].tokens[0])):
        assert every[token] == sum((row.tokens == token).sum() for row in expected)
        assert supervised[token] == sum((row.tokens[row.loss_mask] == token).sum() for row in expected)


def test_threads_read_the_right_records(written):
    records, expected, wrong = Records.open(written), rows(50), []

    def read(seed):
        for record_id in np.random.default_rng(seed).integers(0, 50, 400):
            if not np.array_equal(records[record_id].tokens, expected[record_id].tokens):
                wrong.append(record_id)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_digests_are_over_the_documented_bytes(tmp_path):
    mask = [True, False, False, False, False, False, False, True, True]
    records = tiny_records.write(tmp_path / "a", [encoded([5], [True]), encoded(range(9), mask)])
    content = struct.pack("<iiB", 1, 5, 1) + struct.pack("<i9i2B", 9, *range(9), 0b10000001, 1)
    shard = hashlib.sha256(content).hexdigest()
    assert records.manifest["shards"] == [{"file": "records-00000.arrayrecord", "records": 2, "digest": shard}]
    assert records.digest == hashlib.sha256(shard.encode()).hexdigest()


def test_the_manifest_counts_tokens_and_lengths(tmp_path):
    sizes = [*range(1, 100), 1000]
    records = tiny_records.write(tmp_path / "a", [encoded([3] * n, [True] + [False] * (n - 1)) for n in sizes])
    assert [records.manifest[key] for key in ("records", "tokens", "supervised")] == [100, 4950 + 1000, 100]
    assert records.manifest["lengths"] == {"mean": 59.5, "p50": 50, "p90": 90, "p99": 99, "max": 1000}


NAMES = [shard_name(3), LENGTHS, MANIFEST]


@pytest.mark.parametrize("name", NAMES)
def test_half_a_file_is_refused(written, name):
    content = (written / name).read_bytes()
    (written / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=rf"{name} is damaged"):
        Records.open(written)


@pytest.mark.parametrize("name", [*NAMES, COUNTS, UNUSED])
def test_a_missing_file_is_refused(written, name):
    (written / name).unlink()
    with pytest.raises(UserError, match=f"lacks {name}"):
        Records.open(written)


def test_half_a_file_of_counts_is_named_when_it_is_read(written):
    content = (written / COUNTS).read_bytes()
    (written / COUNTS).write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=f"{COUNTS} is damaged"):
        Records.open(written).token_counts()


def test_a_shard_of_another_folder_is_refused(written):
    (written / shard_name(4)).write_bytes((written / shard_name(1)).read_bytes())
    with pytest.raises(UserError, match=r"records-00004.arrayrecord is damaged: it holds 20 records, .* says 1"):
        Records.open(written)


def test_disagreeing_lengths_are_refused(written):
    lengths = np.load(written / LENGTHS)
    np.save(written / LENGTHS, lengths[:-1])
    with pytest.raises(UserError, match=r"lengths.npy is damaged: it holds 49 lengths .* says 50"):
        Records.open(written)
    np.save(written / LENGTHS, lengths[::-1])  # same count and sum: only reading can tell
    with pytest.raises(UserError, match=r"record 0 has .* bytes for .* tokens"):
        Records.open(written)[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": None}, "says 50 of None"),
        ({"shards": []}, "do not hold as many"),
        ({"shards": None}, "TypeError"),
        ({"digest": None}, "or no digest"),
        ({"format": 1}, "of format 1, and this version reads format 2"),
        ({"format": None}, "of format None"),
    ],
)
def test_a_manifest_that_cannot_be_is_refused(written, changes, message):
    manifest = json.loads((written / MANIFEST).read_text())
    (written / MANIFEST).write_text(json.dumps(manifest | changes))
    with pytest.raises(UserError, match=message):
        Records.open(written)


def test_a_manifest_without_totals_is_refused(written):
    (written / MANIFEST).write_text(json.dumps({"format": 2}))
    with pytest.raises(UserError, match="KeyError"):
        Records.open(written)


def test_flipped_bytes_are_found_when_read(written):
    file = written / shard_name(1)
    content = bytearray(file.read_bytes())
    content[9_000:9_008] = bytes(8)
    file.write_bytes(content)
    records = Records.open(written)
    with pytest.raises(UserError, match=r"records-00001.arrayrecord is damaged: record \d+ is unreadable"):
        list(map(records.__getitem__, range(50)))


def test_tokens_and_mask_of_other_lengths_are_a_bug():
    with pytest.raises(ValueError, match="tokens have shape"):
        pack(encoded([1, 2], [True]))
