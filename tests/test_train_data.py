"""Whole trainings from prepared folders, in packed batches, and with buckets that were found, not given."""

import json
import math
import re

import pytest
import tiny_runs
import tool_files
from run_files import repeatable

from dflash_jax import prepare, train
from dflash_jax.data.records import Records
from dflash_jax.errors import UserError
from dflash_jax.monitor.json_lines import read_lines

pytestmark = pytest.mark.usefixtures("compiled_once")


def lines_of(recipe, out):
    return list(read_lines(recipe.root / out / "train_log.jsonl"))


def test_a_prepared_folder_trains_as_its_conversations_do(recipe):
    short = ["train.steps=2", "eval.every=0"]
    assert train.main(recipe.arguments("raw", *short)) == 0
    folder = recipe.root / "prepared"
    given = [f"target={recipe.root / 'llama'}", f"input={recipe.root / 'train.jsonl'}", f"output={folder}"]
    assert prepare.main(given) == 0
    assert train.main(recipe.arguments("folder", f"data.train={folder}", *short)) == 0
    assert not (recipe.root / "folder" / "data").exists()
    raw, prepared = (repeatable(recipe.root / out) for out in ("raw", "folder"))
    assert len(raw) == 2
    assert raw == prepared


def test_packed_rows_train_on_every_record_once_a_pass(recipe):
    arguments = [
        "data.batching=packed",
        "train.steps=null",
        "train.epochs=2",
        "eval.every=0",
        "objective.anchors=16",
    ]
    assert train.main(recipe.arguments("packed", *arguments)) == 0
    lines, records = lines_of(recipe, "packed"), Records.open(recipe.root / "packed" / "data" / "train")
    assert sum(line["sequences"] for line in lines) == 2 * len(records)
    assert sum(line["tokens"] for line in lines) == 2 * records.lengths.sum()
    assert sum(line["rows"] for line in lines) < 2 * len(records)
    assert {line["seq_len"] for line in lines} == {192}
    assert lines[-1]["epoch"] == 2
    assert all(math.isfinite(line["loss"]) for line in lines)


def test_buckets_that_are_found_fit_the_data(recipe, capsys):
    assert train.main(recipe.arguments("auto", "data.buckets=auto:2", "train.steps=1", "eval.every=0")) == 0
    lengths = Records.open(recipe.root / "auto" / "data" / "train").lengths
    assert re.search(rf"^ +{lengths.max()} +6 ", capsys.readouterr().out, re.M)
    assert max(line["seq_len"] for line in lines_of(recipe, "auto")) <= lengths.max()


def test_a_folder_prepared_with_another_template_or_tokenizer_is_refused(recipe, tmp_path):
    other = tiny_runs.save_chat_llama(tmp_path / "other")
    file = other / "chat_template.jinja"
    file.write_text(file.read_text().replace("{{ m.content }}", "{{ m.content | trim }}"))
    folder = tmp_path / "records"
    given = [f"target={other}", f"input={recipe.root / 'train.jsonl'}", f"output={folder}"]
    assert prepare.main(given) == 0
    with pytest.raises(UserError, match="was prepared with another chat template"):
        train.main(recipe.arguments("refused", f"data.train={folder}"))
    settings = json.loads((other / "tokenizer.json").read_text())
    settings["model"]["vocab"] |= {"Ġa": 263}
    (other / "tokenizer.json").write_text(json.dumps(settings))
    again = tmp_path / "again"
    assert prepare.main([*given[:2], f"output={again}"]) == 0
    with pytest.raises(UserError, match="was prepared with another tokenizer"):
        train.main(recipe.arguments("refused", f"data.train={again}"))
    assert not (recipe.root / "refused" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data.train=nowhere.jsonl"], r"data\.train: .*nowhere\.jsonl"),
        (["data.heldout=nowhere.jsonl"], r"data\.heldout: .*nowhere\.jsonl"),
        (["data.buckets=auto"], r"data\.buckets: found 'auto'"),
        (["data.buckets=[20]"], r"holds no record of at most 20 tokens"),
        (["data.buckets=auto:2", "data.tokens_per_batch=300"], r"leaves no row for the longest record"),
        (["data.batching=pack"], r"data\.batching: found 'pack'"),
        (["data.template.enable_thinking=false"], r"enable_thinking"),
    ],
)
def test_bad_data_is_refused_before_anything_is_loaded(recipe, arguments, message):
    with pytest.raises(UserError, match=message):
        train.main(recipe.arguments("bad", *arguments))
    assert not (recipe.root / "bad" / "checkpoints").exists()


def test_the_loader_benchmark_reads_the_batches_of_a_run(recipe, capsys):
    assert train.main(recipe.arguments("timed", "train.steps=2", "eval.every=0")) == 0
    bench = tool_files.load("bench_loader")
    assert bench.main([f"run={recipe.root / 'timed'}", "batches=200"]) == 0
    shown = re.search(r"read (\S+) tokens/s, trained (\S+) tokens/s: (\d+) times as fast", capsys.readouterr().out)
    assert shown is not None
    assert float(shown[1]) / float(shown[2]) == pytest.approx(int(shown[3]), rel=0.05, abs=1)
