"""Features on disk come back bit for bit, stay within their bound, and survive kills, full disks and damage."""

import dataclasses
import errno
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from dflash_jax.errors import UserError
from dflash_jax.objective.objective import TargetStates
from dflash_jax.training import feature_shards
from dflash_jax.training.feature_store import Content, FeatureStore

LENGTHS = np.array([3, 5, 2, 8, 4, 6, 1, 7], np.int32)
CONTENT = Content(
    target="digest", name="tiny", dtype="float32", taps=(1, 3), data="data", features_width=6, last_width=3
)
ALL = range(len(LENGTHS))


def states(record_id: int, content: Content = CONTENT) -> TargetStates:
    random = np.random.default_rng(record_id)
    widths = (content.features_width, content.last_width)
    dtype = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}[content.dtype]
    features, last = (random.standard_normal((LENGTHS[record_id], width)).astype(dtype) for width in widths)
    return TargetStates(features, last if content.last_width else None)


def opened(folder: pathlib.Path, content: Content = CONTENT, **changes) -> FeatureStore:
    options = {"lengths": LENGTHS, "record_ids": np.array(ALL), "limit_bytes": 10**6, "patient": True}
    return FeatureStore(folder, content, **(options | changes))


def fill(store: FeatureStore, record_ids=ALL) -> None:
    for record_id in record_ids:
        if store.wants(record_id):
            store.keep(record_id, states(record_id, store._content))


def check(store: FeatureStore, record_ids) -> None:
    """That the store returns what was kept, for these records and no others."""
    assert [record_id for record_id in ALL if store.holds([record_id])] == sorted(record_ids)
    found = store.read(record_ids)
    for record_id in record_ids:
        expected = states(record_id, store._content)
        assert (found[record_id].last is None) == (expected.last is None)
        for values, given in zip(found[record_id], expected, strict=True):
            if given is not None:
                assert values.dtype == given.dtype
                np.testing.assert_array_equal(values, given)


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def shard(store: FeatureStore, number: int) -> pathlib.Path:
    return store.directory / f"features-{number:05d}.arrayrecord"


@pytest.mark.parametrize("last_width", [0, 3], ids=["features alone", "with last states"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_come_back_bit_for_bit(tmp_path, monkeypatch, dtype, last_width):
    content = dataclasses.replace(CONTENT, dtype=dtype, last_width=last_width)
    monkeypatch.setattr(feature_shards, "SHARD_BYTES", 12 * content.token_bytes)
    with opened(tmp_path, content) as store:
        assert not store.complete
        fill(store, [5, 0, 7, 2])
        fill(store)
        store.finish()
        assert store.complete
        check(store, [6, 0, 5, 1, 2, 3, 4, 7])
    with opened(tmp_path, content) as again:
        assert again.complete
        assert not any(again.wants(record_id) for record_id in ALL)
        assert again.size_bytes == LENGTHS.sum() * (6 + last_width) * {"float32": 4, "bfloat16": 2}[dtype]
        check(again, list(ALL))
    found = [json.loads(file.read_text())["records"] for file in sorted(again.directory.glob("features-*.json"))]
    assert found == [[5, 0, 7], [2, 1, 3], [4, 6]]  # a shard ends with the record that fills it
    assert again.directory.name == content.address[:16]
    meta = json.loads((again.directory / "meta.json").read_text())
    assert (meta["name"], meta["dtype"], meta["taps"], meta["data"]) == ("tiny", dtype, [1, 3], "data")


def test_what_is_kept_can_be_read_before_the_end_once_nothing_is_missing(tmp_path):
    with opened(tmp_path) as store:
        fill(store)
        wait_until(lambda: store.complete)
        check(store, list(ALL))


@pytest.mark.parametrize(
    "change",
    [
        {"target": "another"},
        {"dtype": "bfloat16"},
        {"taps": (3, 1)},
        {"data": "another"},
        {"last_width": 0},
        {"features_width": 9},
    ],
    ids=lambda change: next(iter(change)),
)
def test_other_states_have_another_address(tmp_path, change):
    with opened(tmp_path) as store:
        fill(store)
    other = opened(tmp_path, dataclasses.replace(CONTENT, **change))
    assert other.directory != store.directory
    assert other.size_bytes == 0


def test_the_name_of_the_target_does_not_matter(tmp_path):
    with opened(tmp_path) as store:
        fill(store)
    assert opened(tmp_path, dataclasses.replace(CONTENT, name="moved")).complete


def test_the_bound_is_kept_and_nothing_is_replaced(tmp_path):
    limit = int(LENGTHS[:3].sum() + 7) * CONTENT.token_bytes
    with opened(tmp_path, limit_bytes=limit) as store:
        fill(store)  # the fourth has eight tokens, one too many
        assert not any(store.wants(record_id) for record_id in ALL)
        wait_until(lambda: store.holds([0, 1, 2]))
        check(store, [0, 1, 2])
        assert store.size_bytes == int(LENGTHS[:3].sum()) * CONTENT.token_bytes <= limit
    with opened(tmp_path, limit_bytes=limit) as later:
        fill(later, [4, 6, 7])  # there is room for seven tokens more
        later.finish()
        check(later, [0, 1, 2, 4, 6])
    before = sorted((file.name, file.stat().st_mtime_ns) for file in later.directory.iterdir())
    with opened(tmp_path, limit_bytes=limit // 2) as less:
        fill(less)
        check(less, [0, 1, 2, 4, 6])
    assert sorted((file.name, file.stat().st_mtime_ns) for file in later.directory.iterdir()) == before


def test_what_would_be_missing_is_known_beforehand(tmp_path):
    taking_part = np.array([0, 3, 7])
    with opened(tmp_path, record_ids=taking_part) as store:
        assert store.missing_bytes == (3 + 8 + 7) * CONTENT.token_bytes
        fill(store, [3, 4])
        assert store.missing_bytes == (3 + 7) * CONTENT.token_bytes
        store.finish()
        check(store, [3])  # the other one does not take part


KILLED = """
import os, pathlib, signal, sys
sys.path.insert(0, {tests!r})
import test_feature_store as this
from dflash_jax.training import feature_shards
feature_shards.SHARD_BYTES = 8 * this.CONTENT.token_bytes
store = this.opened(pathlib.Path({folder!r})).__enter__()
this.fill(store, [0, 1, 2, 3, 4])
this.wait_until(lambda: store.holds([2, 3]) and this.shard(store, 2).exists())
print("filling", flush=True)
signal.pause()
"""


def test_a_kill_costs_the_shard_that_was_being_written(tmp_path, monkeypatch):
    monkeypatch.setattr(feature_shards, "SHARD_BYTES", 8 * CONTENT.token_bytes)
    code = KILLED.format(tests=str(pathlib.Path(__file__).parent), folder=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "filling\n"
    with (
        pytest.raises(UserError, match=rf"are being written by process {process.pid}; wait for it"),
        opened(tmp_path),
    ):
        pass
    process.send_signal(signal.SIGKILL)
    process.communicate()
    with opened(tmp_path) as store:
        check(store, [0, 1, 2, 3])
        assert not shard(store, 2).exists()
        assert [record_id for record_id in ALL if store.wants(record_id)] == [4, 5, 6, 7]
        fill(store)
        store.finish()
        check(store, list(ALL))


def test_one_process_writes_and_others_read(tmp_path):
    with opened(tmp_path) as first:
        fill(first, [0, 1])
        with pytest.raises(UserError, match=rf"process {os.getpid()}; .*data\.features_dir"), opened(tmp_path):
            pass
        fill(first)
        first.finish()
        with opened(tmp_path) as second:
            check(second, list(ALL))


def leave_half(file: pathlib.Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip_a_bit(file: pathlib.Path) -> None:
    content = bytearray(file.read_bytes())
    at = content.index(states(0).features.tobytes()[:8])
    content[at] ^= 1
    file.write_bytes(content)


def leave_other_text(file: pathlib.Path) -> None:
    file.write_text('{"records": [0, 1')


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("features-00000.arrayrecord", leave_half),
        ("features-00000.arrayrecord", flip_a_bit),
        ("features-00000.json", leave_other_text),
    ],
    ids=["truncated", "flipped", "index"],
)
def test_a_damaged_file_is_named_and_may_be_deleted(tmp_path, name, harm):
    with opened(tmp_path) as store:
        fill(store)
    file = store.directory / name
    harm(file)
    with pytest.raises(UserError, match=rf"{file} is damaged: .*Delete it"), opened(tmp_path) as found:
        found.read(ALL)
    file.unlink()
    with opened(tmp_path) as store:
        fill(store)
        store.finish()
        check(store, list(ALL))


def full_disk(monkeypatch, kind: str) -> None:
    """Let the second shard meet a full disk: one that raises OSError, or a device that is always full."""
    real = feature_shards.array_record_module.ArrayRecordWriter

    class FullDisk:
        def __init__(self, path: str, options: str):
            self.inner = real("/dev/full" if kind == "device" and "00001" in path else path, options)
            self.failing = kind == "error" and "00001" in path

        def write(self, content: bytes) -> None:
            if self.failing:
                raise OSError(errno.ENOSPC, "No space left on device")
            self.inner.write(content)

        def close(self) -> None:
            self.inner.close()

    monkeypatch.setattr(feature_shards.array_record_module, "ArrayRecordWriter", FullDisk)
    monkeypatch.setattr(feature_shards, "SHARD_BYTES", 16 * CONTENT.token_bytes)


@pytest.mark.parametrize("kind", ["error", "device"])
def test_a_full_disk_ends_the_writing_with_one_warning(tmp_path, monkeypatch, capfd, kind):
    full_disk(monkeypatch, kind)
    with opened(tmp_path, patient=False) as store:
        fill(store)
        wait_until(lambda: not store.wants(0) and bool(store._writer and store._writer.fault))
        fill(store)
        check(store, [0, 1, 2, 3])
    warnings = [line for line in capfd.readouterr().err.splitlines() if "warning" in line]
    assert len(warnings) == 1
    assert "No space left on device" in warnings[0]
    assert not shard(store, 1).exists()


def test_a_full_disk_ends_a_patient_writer_and_what_was_written_stays(tmp_path, monkeypatch):
    def write_all() -> None:
        with opened(tmp_path) as store:
            fill(store)

    with monkeypatch.context() as patched:
        full_disk(patched, "device")
        with pytest.raises(UserError, match=r"No space left.*the same command continues"):
            write_all()
    check(opened(tmp_path), [0, 1, 2, 3])
    write_all()
    check(opened(tmp_path), list(ALL))


def test_a_slow_disk_makes_only_a_patient_writer_wait(tmp_path, monkeypatch):
    real = feature_shards.array_record_module.ArrayRecordWriter

    class SlowDisk:
        def __init__(self, path: str, options: str):
            self.inner = real(path, options)

        def write(self, content: bytes) -> None:
            time.sleep(0.1)
            self.inner.write(content)

        def close(self) -> None:
            self.inner.close()

    monkeypatch.setattr(feature_shards.array_record_module, "ArrayRecordWriter", SlowDisk)
    monkeypatch.setattr(feature_shards, "QUEUE_BYTES", 1)
    with opened(tmp_path / "in a hurry", patient=False) as store:
        fill(store)
        assert 0 < len([record_id for record_id in ALL if record_id not in store._missing]) < len(ALL)
        taken = [record_id for record_id in ALL if record_id not in store._missing]
    with opened(tmp_path / "in a hurry", patient=False) as store:
        check(store, taken)
    with opened(tmp_path / "patient") as store:
        fill(store)
        store.finish()
        check(store, list(ALL))


def test_many_shards_do_not_use_up_open_files(tmp_path, monkeypatch):
    monkeypatch.setattr(feature_shards, "SHARD_BYTES", 1)
    monkeypatch.setattr(feature_shards, "OPEN_FILES", 2)
    with opened(tmp_path) as store:
        fill(store)
        store.finish()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            check(store, list(ALL))
        assert len(os.listdir("/proc/self/fd")) <= before + 2 + feature_shards.READ_THREADS
    assert len(list(store.directory.glob("*.arrayrecord"))) == len(ALL)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UserError, match=r"data\.features_dir: .*file/.* cannot be written"),
        opened(tmp_path / "file"),
    ):
        pass
