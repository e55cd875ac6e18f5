"""What TensorBoard is given of a run, read back from its files."""

import contextlib
import re

import pytest
from event_files import add_steps, events_of, layouts_of, purges_of, steps_in, values_of
from tensorboardX.proto.layout_pb2 import Layout

from dflash_jax.monitor.board import Board, record

LINE = {
    "step": 3,
    "epoch": 0.5,
    "epochs": 2,
    "tokens": 640,
    "rows": 4,
    "sequences": 5,
    "records": "996b99d2a03dcae8",
    "seq_len": 192,
    "bucket": 1,
    "padding": 0.25,
    "recalled": 0.5,
    "prefetch_queue": 2,
    "feature_queue": 1,
    "data_wait_s": 0.125,
    "feature_wait_s": 0.0,
    "loss": 4.0,
    "loss_ce": 3.5,
    "acc": 0.5,
    "acc_by_position": [0.75, 0.625, 0.5],
    "streak": 1.75,
    "accept_len": 2.75,
    "survival_by_position": [0.75, 0.5, 0.5],
    "top4_acc": 0.75,
    "ddtree_streak4": 2.0,
    "blocks": 8.0,
    "lr": 0.0625,
    "noise_std": 0.5,
    "grad_norm": "nan",
    "update_ratio": 0.0078125,
    "skipped": 1,
    "step_s": 0.5,
    "drafter_tok_s": 1024.0,
    "target_tok_s": 2048.0,
    "drafter_mfu": 0.5,
    "target_mfu": 0.25,
    "drafter_memory_gib": 1.5,
    "target_memory_gib": 2.5,
    "host_memory_gib": 3.5,
    "checkpoint": 2,
    "saving": 0,
    "elapsed_s": 1.5,
    "eta_s": 2.5,
    "bucket_steps": 2,
}
EVALUATION = {
    "step": 4,
    "loss": 5.0,
    "accept_len": 1.5,
    "walk_tau": 1.25,
    "decode_accept_len": 1.125,
    "acc_by_position": [0.5, "nan"],
}


def test_every_figure_of_a_step_has_its_tag(folder, opened, said):
    opened.add_step(LINE)
    assert values_of(folder, "simple_value") == {
        ("train/loss", 3): 4.0,
        ("train/loss_ce", 3): 3.5,
        ("train/acc", 3): 0.5,
        ("train/acc_by_position/1", 3): 0.75,
        ("train/acc_by_position/2", 3): 0.625,
        ("train/acc_by_position/3", 3): 0.5,
        ("train/streak", 3): 1.75,
        ("train/accept_len", 3): 2.75,
        ("train/survival_by_position/1", 3): 0.75,
        ("train/survival_by_position/2", 3): 0.5,
        ("train/survival_by_position/3", 3): 0.5,
        ("train/top4_acc", 3): 0.75,
        ("train/ddtree_streak4", 3): 2.0,
        ("bucket_1/loss", 3): 4.0,
        ("bucket_1/accept_len", 3): 2.75,
        ("bucket_1/steps", 3): 2.0,
        ("optim/lr", 3): 0.0625,
        ("optim/noise_std", 3): 0.5,
        ("optim/update_ratio", 3): 0.0078125,
        ("optim/skipped", 3): 1.0,
        ("data/epoch", 3): 0.5,
        ("data/epochs", 3): 2.0,
        ("data/tokens", 3): 640.0,
        ("data/rows", 3): 4.0,
        ("data/sequences", 3): 5.0,
        ("data/seq_len", 3): 192.0,
        ("data/bucket", 3): 1.0,
        ("data/bucket_steps", 3): 2.0,
        ("data/blocks", 3): 8.0,
        ("data/padding", 3): 0.25,
        ("data/recalled", 3): 0.5,
        ("data/prefetch_queue", 3): 2.0,
        ("data/feature_queue", 3): 1.0,
        ("time/data_wait_s", 3): 0.125,
        ("time/feature_wait_s", 3): 0.0,
        ("time/step_s", 3): 0.5,
        ("time/drafter_tok_s", 3): 1024.0,
        ("time/target_tok_s", 3): 2048.0,
        ("time/drafter_mfu", 3): 0.5,
        ("time/target_mfu", 3): 0.25,
        ("time/checkpoint", 3): 2.0,
        ("time/saving", 3): 0.0,
        ("time/elapsed_s", 3): 1.5,
        ("time/eta_s", 3): 2.5,
        ("memory/drafter_memory_gib", 3): 1.5,
        ("memory/target_memory_gib", 3): 2.5,
        ("memory/host_memory_gib", 3): 3.5,
    }
    assert not said


def test_an_evaluation_and_a_text_have_theirs(folder, opened):
    opened.add_evaluation(EVALUATION)
    opened.text("recipe", "a: 1\nb:\n  c: 2", 5)
    assert values_of(folder, "simple_value") == {
        ("eval/loss", 4): 5.0,
        ("eval/accept_len", 4): 1.5,
        ("eval/walk_tau", 4): 1.25,
        ("eval/decode_accept_len", 4): 1.125,
        ("eval/acc_by_position/1", 4): 0.5,
    }
    shown = values_of(folder, "tensor")["recipe/text_summary", 5]
    assert shown.string_val[0] == b"    a: 1\n    b:\n      c: 2\n"


@pytest.mark.parametrize(
    ("survival", "blocks", "shortest", "counts"),
    [
        ([0.75, 0.5, 0.5], 8.0, 1, [2, 2, 0, 4]),
        # Shares of 24 blocks, as float32 has them: 11, 9, 6, 5 and 3 blocks.
        ([0.45833334, 0.375, 0.25, 0.20833333, 0.125], 24.0, 1, [13, 2, 3, 1, 2, 3]),
        ([1.0, 0.5, 0.0], 6.0, 2, [3, 3]),
        ([0.0, 0.0], 5, 1, [5]),
        ([1.0, 1.0], 5, 3, [5]),
    ],
)
def test_blocks_are_counted_by_accept_length(folder, opened, survival, blocks, shortest, counts):
    opened.add_step({"step": 7, "survival_by_position": survival, "blocks": blocks})
    histogram = values_of(folder, "histo")["train/blocks_by_accept_len", 7]
    assert list(histogram.bucket) == counts
    assert list(histogram.bucket_limit) == [shortest + bin + 0.5 for bin in range(len(counts))]
    assert (histogram.min, histogram.max) == (shortest - 0.5, shortest + len(counts) - 0.5)
    assert histogram.num == blocks
    assert histogram.sum / blocks == pytest.approx(1 + sum(survival))  # the accept length


@pytest.mark.parametrize(
    "line",
    [
        {},
        {"blocks": 4.0},
        {"survival_by_position": [0.5]},
        {"survival_by_position": [0.0], "blocks": 0.0},
        {"survival_by_position": ["nan"], "blocks": 4.0},
        {"survival_by_position": [0.5], "blocks": "nan"},
        {"survival_by_position": [], "blocks": 4.0},
    ],
)
def test_a_step_that_tells_no_accept_lengths_has_no_histogram(folder, opened, line):
    opened.add_step({"step": 1, **line})
    assert not values_of(folder, "histo")


def test_the_page_groups_what_is_read_together(folder, opened):
    opened.add_step(LINE | {"grad_norm": 2.0})
    opened.add_evaluation(EVALUATION)
    tags = [tag for tag, _ in values_of(folder, "simple_value")]
    (layout,) = map(Layout.FromString, layouts_of(folder))
    shown = {
        (category.title, chart.title): {
            tag for tag in tags for pattern in chart.multiline.tag if re.match(pattern, tag)
        }
        for category in layout.category
        for chart in category.chart
    }
    assert all(shown.values()), "a chart that shows nothing"
    assert shown["Training", "loss, with its terms"] == {"train/loss", "train/loss_ce"}
    assert shown["Training", "accept length"] == {"train/accept_len"}
    assert shown["Training", "accuracy by position"] == {f"train/acc_by_position/{k}" for k in (1, 2, 3)}
    assert set().union(*(found for (category, _), found in shown.items() if category == "Held-out")) == {
        "eval/loss",
        "eval/accept_len",
        "eval/walk_tau",
        "eval/decode_accept_len",
        "eval/acc_by_position/1",
    }
    assert shown["Training beside held-out", "loss"] == {"train/loss", "eval/loss"}
    assert shown["Training beside held-out", "accept length"] == {"train/accept_len", "eval/accept_len"}
    assert shown["Buckets", "loss"] == {"bucket_1/loss"}
    assert shown["Buckets", "accept length"] == {"bucket_1/accept_len"}
    assert shown["Queues and waits", "batches ready"] == {"data/prefetch_queue", "data/feature_queue"}
    assert shown["Queues and waits", "seconds of a step, and waited in it"] == {
        "time/step_s",
        "time/data_wait_s",
        "time/feature_wait_s",
    }
    assert shown["Rates", "tokens per second"] == {"time/drafter_tok_s", "time/target_tok_s"}
    assert shown["Memory", "GiB in use"] == {f"memory/{of}_memory_gib" for of in ("drafter", "target", "host")}


def test_a_resume_tells_which_points_to_drop_in_a_file_of_its_own(folder, said):
    for resumed_at, steps in ((0, (1, 2, 3)), (2, (3, 4)), (2, (3,))):  # within a second
        with contextlib.closing(Board(folder, resumed_at=resumed_at, warn=said.append)) as opened:
            add_steps(opened, steps)
    first, *resumed = sorted(folder.iterdir())
    assert first.name.endswith(".after-step-0")
    assert purges_of(first) == [0]
    assert [purges_of(file) for file in resumed] == [[3], [3]]
    assert sorted(
        event.step for file in resumed for event in events_of(file) if event.step and event.summary.value
    ) == [
        3,
        3,
        4,
    ]
    assert not said


def test_an_entry_is_there_as_soon_as_it_is_added(folder, opened):
    add_steps(opened, [1])
    assert steps_in(folder) == [1]


def test_what_is_measured_later_joins_the_record(folder, opened):
    add_steps(opened, [1])
    for tokens_s in (2.0, 3.0):
        record(folder.parent, 1, {"decode/all/chain/tokens_s": tokens_s}, name="evaluate")
    assert values_of(folder, "simple_value")["decode/all/chain/tokens_s", 1] in (2.0, 3.0)
    assert steps_in(folder) == [1]
    assert len([*folder.iterdir()]) == 3
