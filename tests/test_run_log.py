"""Every step has one line and one TensorBoard point, a step late, whatever kills and resumes come between."""

import json
import struct

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from dflash_jax.monitor.json_lines import read_lines
from dflash_jax.monitor.run_log import RunLog


class DeviceValue:
    """Stands in for an array on a device and records when it is fetched."""

    def __init__(self, number, fetched):
        self.number, self.fetched = number, fetched

    def __array__(self, dtype=None, copy=None):
        self.fetched.append(self.number)
        return np.asarray(self.number, dtype)


def log_steps(directory, steps, *, resumed_at, note=0):
    with RunLog(directory, resumed_at=resumed_at, warn=pytest.fail) as log:
        for step in steps:
            log.log_step(step, {"loss": step / 2, "note": note})


def steps_in(file):
    return [json.loads(line)["step"] for line in file.read_text().splitlines()]


def events_of(directory):
    """TensorBoard's records, read by the TFRecord layout: length (8 bytes), its CRC (4), data, CRC (4)."""
    for file in sorted((directory / "tensorboard").iterdir()):
        content, start = file.read_bytes(), 0
        while start < len(content):
            (length,) = struct.unpack_from("<Q", content, start)
            yield Event.FromString(content[start + 12 : start + 12 + length])
            start += 16 + length


def points_of(directory):
    return {
        (value.tag, event.step): value.simple_value
        for event in events_of(directory)
        for value in event.summary.value
        if value.WhichOneof("value") == "simple_value"
    }


def test_a_step_is_fetched_and_written_when_the_next_one_is_logged(tmp_path):
    fetched, shown, file = [], [], tmp_path / "train_log.jsonl"
    with RunLog(tmp_path, resumed_at=0, warn=pytest.fail, observers=(shown.append,)) as log:
        log.log_step(1, {"loss": DeviceValue(11, fetched)})
        assert fetched == []
        assert file.read_text() == ""
        log.log_step(2, {"loss": DeviceValue(22, fetched)})
        assert fetched == [11]
        assert file.read_text() == '{"step": 1, "loss": 11}\n'
        log.flush()
        assert fetched == [11, 22]
        assert steps_in(file) == [1, 2]
        log.flush()
        log.log_step(3, {"loss": DeviceValue(33, fetched)})
    assert fetched == [11, 22, 33]
    assert shown == [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["loss"] for line in shown] == [11, 22, 33]


def test_the_held_step_is_written_when_the_run_fails(tmp_path):
    def failing_run():
        with RunLog(tmp_path, resumed_at=0, warn=pytest.fail) as log:
            log.log_step(1, {"loss": 1.0})
            raise RuntimeError("the run failed")

    with pytest.raises(RuntimeError, match="the run failed"):
        failing_run()
    assert steps_in(tmp_path / "train_log.jsonl") == [1]


def test_device_values_keep_their_own_digits_and_line_order(tmp_path):
    values = {
        "loss": jnp.float32(0.1),
        "lr": 6e-4,
        "acc_by_position": jnp.array([0.5, 0.25], jnp.float32),
        "rows": jnp.int32(6),
        "skipped": jnp.bool_(True),
        "half": jnp.bfloat16(0.75),
        "digest": "ab12",
    }
    with RunLog(tmp_path, resumed_at=0, warn=pytest.fail) as log:
        log.log_step(1, values)
    assert (tmp_path / "train_log.jsonl").read_text() == (
        '{"step": 1, "loss": 0.1, "lr": 0.0006, "acc_by_position": [0.5, 0.25], "rows": 6, "skipped": 1, '
        '"half": 0.75, "digest": "ab12"}\n'
    )


@pytest.mark.parametrize("step", [1, 2, 4])
def test_a_missing_or_repeated_step_is_refused(tmp_path, step):
    with RunLog(tmp_path, resumed_at=0, warn=pytest.fail) as log:
        log.log_step(1, {})
        log.log_step(2, {})
        with pytest.raises(ValueError, match=f"step {step} was logged after step 2"):
            log.log_step(step, {})


def test_a_resumed_run_has_each_step_once_and_keeps_what_it_abandoned(tmp_path):
    file = tmp_path / "train_log.jsonl"
    log_steps(tmp_path, range(1, 8), resumed_at=0)
    first_lines = file.read_bytes().splitlines(keepends=True)[:4]
    log_steps(tmp_path, range(5, 7), resumed_at=4, note=1)
    log_steps(tmp_path, range(5, 10), resumed_at=4, note=2)
    assert steps_in(file) == [*range(1, 10)]
    assert file.read_bytes().startswith(b"".join(first_lines))
    assert [line["note"] for line in read_lines(file)] == [0] * 4 + [2] * 5
    aside = [*read_lines(tmp_path / "train_log.after-step-4.jsonl")]
    assert [(line["step"], line["note"]) for line in aside] == [(5, 0), (6, 0), (7, 0), (5, 1), (6, 1)]


def test_a_run_from_the_start_sets_the_whole_earlier_log_aside(tmp_path):
    log_steps(tmp_path, range(1, 4), resumed_at=0)
    log_steps(tmp_path, range(1, 3), resumed_at=0, note=1)
    assert [line["note"] for line in read_lines(tmp_path / "train_log.jsonl")] == [1, 1]
    assert steps_in(tmp_path / "train_log.after-step-0.jsonl") == [1, 2, 3]


@pytest.mark.parametrize("torn", [b'{"step": 3, "lo', b'{"step": 3}', b'{"step": 3, "lo\n', b"\0\0\0\0\n"])
def test_a_torn_line_is_set_aside(tmp_path, torn):
    file = tmp_path / "train_log.jsonl"
    kept = b'{"step":1,  "loss":1.50}\n{"step": 2}\n'
    file.write_bytes(kept + torn)
    assert [line["step"] for line in read_lines(file)] == [1, 2]
    log_steps(tmp_path, [3], resumed_at=2)
    assert file.read_bytes() == kept + b'{"step": 3, "loss": 1.5, "note": 0}\n'
    assert (tmp_path / "train_log.after-step-2.jsonl").read_bytes() == torn.rstrip(b"\n") + b"\n"
    assert sorted(path.name for path in tmp_path.glob("train_log*")) == [
        "train_log.after-step-2.jsonl",
        "train_log.jsonl",
    ]


def test_evaluations_are_written_at_once_and_resume_like_steps(tmp_path):
    file = tmp_path / "eval_log.jsonl"
    with RunLog(tmp_path, resumed_at=0, warn=pytest.fail) as log:
        log.log_evaluation(0, {"accept_len": 1.0, "survival": [0.5, np.nan]})
        assert file.read_text() == '{"step": 0, "accept_len": 1.0, "survival": [0.5, "nan"]}\n'
        log.log_evaluation(20, {"accept_len": 2.0})
    with RunLog(tmp_path, resumed_at=10, warn=pytest.fail) as log:
        log.log_evaluation(20, {"accept_len": 3.0})
    assert [line["accept_len"] for line in read_lines(file)] == [1.0, 3.0]
    assert steps_in(tmp_path / "eval_log.after-step-10.jsonl") == [20]
    points = points_of(tmp_path)
    assert points["eval/survival/1", 0] == 0.5
    assert ("eval/survival/2", 0) not in points


def test_non_finite_numbers_stay_valid_json_and_out_of_tensorboard(tmp_path):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    values = {"loss": jnp.float32(jnp.nan), "grad_norm": float("inf"), "acc": -np.inf, "lr": 0.5}
    with RunLog(tmp_path, resumed_at=0, warn=pytest.fail) as log:
        log.log_step(1, values)
    line = json.loads((tmp_path / "train_log.jsonl").read_text(), parse_constant=refuse)
    assert line == {"step": 1, "loss": "nan", "grad_norm": "inf", "acc": "-inf", "lr": 0.5}
    assert points_of(tmp_path) == {("optim/lr", 1): 0.5}


def test_tensorboard_groups_values_by_meaning(tmp_path):
    values = {
        "loss": 4.0,
        "accept_len": 1.5,
        "acc_by_position": [0.5, 0.25],
        "lr": 0.125,
        "bucket": 3,
        "tokens": 64,
        "step_s": 2.0,
        "feature_wait_s": 2,
        "digest": "ab12",
    }
    with RunLog(tmp_path, resumed_at=0, warn=pytest.fail) as log:
        log.text("recipe", "a: 1\nb:\n  c: 2")
        log.log_step(1, values)
    assert points_of(tmp_path) == {
        ("train/loss", 1): 4.0,
        ("train/accept_len", 1): 1.5,
        ("train/acc_by_position/1", 1): 0.5,
        ("train/acc_by_position/2", 1): 0.25,
        ("optim/lr", 1): 0.125,
        ("data/bucket", 1): 3.0,
        ("data/bucket_steps", 1): 1.0,
        ("data/tokens", 1): 64.0,
        ("time/step_s", 1): 2.0,
        ("time/feature_wait_s", 1): 2.0,
        ("bucket_3/loss", 1): 4.0,
        ("bucket_3/accept_len", 1): 1.5,
        ("bucket_3/steps", 1): 1.0,
    }
    values = [value for event in events_of(tmp_path) for value in event.summary.value]
    texts = [value for value in values if value.tag.startswith("recipe")]
    assert [value.tensor.string_val[0] for value in texts] == [b"    a: 1\n    b:\n      c: 2\n"]


def test_the_steps_of_a_bucket_are_counted_across_a_resume(tmp_path):
    buckets = {1: 0, 2: 1, 3: 0, 4: 0, 5: 1}
    with RunLog(tmp_path, resumed_at=0, warn=pytest.fail) as log:
        for step in (1, 2, 3, 4):
            log.log_step(step, {"bucket": buckets[step]})
    with RunLog(tmp_path, resumed_at=3, warn=pytest.fail) as log:
        for step in (4, 5):
            log.log_step(step, {"bucket": buckets[step]})
    assert [line["bucket_steps"] for line in read_lines(tmp_path / "train_log.jsonl")] == [1, 1, 2, 3, 2]


def test_a_resume_tells_tensorboard_which_points_to_drop(tmp_path):
    log_steps(tmp_path, range(1, 6), resumed_at=0)
    log_steps(tmp_path, range(3, 5), resumed_at=2)
    purges = [event.step for event in events_of(tmp_path) if event.HasField("session_log")]
    assert purges == [0, 3]
    written = [step for _, step in points_of(tmp_path)]
    assert sorted(set(written)) == [1, 2, 3, 4, 5]
