"""A folder of records from conversations: exact tokens and counts, whoever made it and wherever it was killed."""

import dataclasses
import hashlib
import json
import signal
import subprocess
import sys
import time

import failing
import numpy as np
import pytest
import tiny_runs

from dflash_jax.chat.tokenizer import load_tokenizer
from dflash_jax.data import prepare, unfinished
from dflash_jax.data.origin import Preparation
from dflash_jax.data.prepare import prepare_records
from dflash_jax.data.records import Records
from dflash_jax.errors import UserError
from dflash_jax.sources import files as source_files

END, START = 256, 257  # <|im_end|> and <|im_start|> of the tokenizer of single bytes


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    path = tmp_path_factory.mktemp("target")
    assert tiny_runs.save_tokenizer(path) == END
    return path


@pytest.fixture
def preparation(target):
    return Preparation(load_tokenizer(target), (END,), {}, max_length=200)


@pytest.fixture
def small_parts(monkeypatch):
    """Five rows a part, two parts a shard."""
    monkeypatch.setattr(source_files, "PART_ROWS", 5)
    monkeypatch.setattr(prepare, "SHARD_PARTS", 2)


@pytest.fixture
def files(tmp_path):
    """Forty-three rows in two files, every seventh of which cannot be used."""
    found = []
    for name, count in (("a.jsonl", 32), ("b.jsonl", 11)):
        file = tiny_runs.write_conversations(tmp_path / name, count, seed=count)
        lines = file.read_text().splitlines()
        lines[6::7] = ['{"messages": []}' for _ in lines[6::7]]
        file.write_text("".join(f"{line}\n" for line in lines))
        found.append(file)
    return found


def contents(directory):
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def spelled(text):
    """Token ids of letters and line ends, by the order of the tokenizer's alphabet: 33-126, 161-172, 174-, ..."""
    return [ord(letter) - 33 if letter != "\n" else 198 for letter in text]


def chat_line(asked, said, **last):
    turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": said, **last}]
    return json.dumps({"messages": turns})


ROWS = [
    chat_line("hi", "yes"),
    json.dumps({"input_ids": [5, 6, 7, 7], "loss_mask": [0, 1, 1, 0]}),
    "{",
    chat_line("hi", "no", truncated=True),
    chat_line("hi", "x" * 200),
    json.dumps({"input_ids": [5, 6, 258], "loss_mask": [0, 1, 1]}),
    json.dumps({"input_ids": [5, 6, 7], "loss_mask": [1, 0, 1]}),
    json.dumps({"input_ids": [1] * 101, "loss_mask": [1] * 101}),
    json.dumps({"input_ids": [1] * 100, "loss_mask": [1] * 100}),
]
UNUSED = [
    (3, "not JSON"),
    (5, "too long"),
    (6, "bad tokens", "token 258, but the target's tokenizer has 0 to 257; tokenise for it"),
    (7, "no anchor", "2 trained tokens, none right after another"),
    (8, "too long", "101 tokens, at most 100; raise max_length"),
]


def test_records_are_the_tokens_of_the_rows_and_the_others_are_listed(tmp_path, preparation):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f"{row}\n" for row in ROWS))
    preparation = dataclasses.replace(preparation, max_length=100)
    records = prepare_records([file], tmp_path / "data", preparation=preparation)
    header = [START, *spelled("user\nhi"), END, *spelled("\n"), START, *spelled("assistant\n")]
    for record_id, said, trained in ((0, "yes", 4), (2, "no", 2)):
        record, length = records[record_id], len(header) + len(said) + 1
        assert record.tokens[:length].tolist() == [*header, *spelled(said), END]
        assert np.flatnonzero(record.loss_mask).tolist() == list(range(len(header), len(header) + trained))
    assert records[1].tokens.tolist() == [5, 6, 7, 7]
    assert records[1].loss_mask.tolist() == [False, True, True, False]
    assert len(records) == 4
    assert len(records[3].tokens) == 100

    listed = [json.loads(line) for line in (tmp_path / "data" / "unused.jsonl").read_text().splitlines()]
    assert [list(line) for line in listed] == [["file", "row", "reason", "detail"]] * 5
    for line, (row, reason, *detail) in zip(listed, UNUSED, strict=True):
        assert (line["file"], line["row"], line["reason"]) == (str(file), row, reason)
        assert detail in ([], [line["detail"]])
    made = records.manifest
    tokens = sum(len(records[index].tokens) for index in range(4))
    assert (made["rows"], made["records"], made["tokens"], made["supervised"]) == (9, 4, tokens, 4 + 2 + 2 + 100)
    assert made["unused"] == {"bad tokens": 1, "no anchor": 1, "not JSON": 1, "too long": 2}
    source = {"name": str(file), "bytes": file.stat().st_size, "rows": 9}
    assert made["sources"] == [source | {"sha256": hashlib.sha256(file.read_bytes()).hexdigest()}]
    assert made["options"] == {"max_length": 100, "too_long": "cut", "last_turn_only": False}
    assert (made["stop_tokens"], made["vocab"], made["chat_template"]) == ([END], 258, tiny_runs.CHAT)
    every, supervised = records.token_counts()
    assert (every[7], supervised[7]) == (2, 1)
    assert every[END] == 2 + 1 + 1
    assert supervised[END] == 1


def test_the_number_of_workers_changes_no_byte(tmp_path, files, preparation, small_parts):
    done = []
    for workers in (1, 2):
        directory = tmp_path / f"workers-{workers}"
        records = prepare_records(
            files,
            directory,
            preparation=preparation,
            workers=workers,
            on_progress=lambda count, tokens: done.append((count, tokens)),
        )
        # 7 parts of the first file, 3 of the second.
        assert [shard["records"] for shard in records.manifest["shards"]] == [9, 9, 8, 7, 5]
        assert sum(count for count, _ in done) == sum(file.stat().st_size for file in files)
        assert sum(tokens for _, tokens in done) == records.manifest["tokens"]
        done.clear()
    assert contents(tmp_path / "workers-1") == contents(tmp_path / "workers-2")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl", "workers-1", "workers-2"]
    assert Records.open(tmp_path / "workers-1").manifest["rows"] == 43


class Killed(BaseException):
    """Stands for the end of the process: nobody expects it."""


MOMENTS = [  # (object, method, calls that are let through)
    (prepare.ShardWriter, "write", 0),
    (prepare.ShardWriter, "close", 2),
    (unfinished.Unfinished, "save", 1),
    (unfinished.Unfinished, "save", 4),
    (unfinished.Unfinished, "finish", 0),
    (unfinished, "write_index", 0),
    (unfinished.pathlib.Path, "rename", 0),
    (unfinished.shutil, "rmtree", 0),
]


@pytest.mark.parametrize(("place", "name", "calls"), MOMENTS)
def test_a_killed_run_continues_to_the_same_bytes(
    tmp_path, files, preparation, small_parts, monkeypatch, place, name, calls
):
    whole, directory = tmp_path / "whole", tmp_path / "data"
    prepare_records(files, whole, preparation=preparation)
    with monkeypatch.context() as patch:
        patch.setattr(place, name, failing.after(calls, getattr(place, name), Killed()))
        with pytest.raises(Killed):
            prepare_records(files, directory, preparation=preparation)
    assert (tmp_path / "data.partial").is_dir()
    assert directory.exists() == (name == "rmtree")
    packed, pack_part = [], prepare.pack_part
    monkeypatch.setattr(prepare, "pack_part", lambda part, **more: packed.append(part) or pack_part(part, **more))
    prepare_records(files, directory, preparation=preparation)
    assert contents(directory) == contents(whole)
    assert not (tmp_path / "data.partial").exists()
    complete = {"write": 0, "close": 2, "save": calls}.get(name, 5)
    assert [part.index for part in packed] == list(range(2 * complete, 10))


SCRIPT = """
import multiprocessing, os, signal, sys
from dflash_jax import prepare
from dflash_jax.data import prepare as engine, unfinished
from dflash_jax.sources import files as source_files

save = unfinished.Unfinished.save

def save_and_die(self, index, tally, *, digest):
    save(self, index, tally, digest=digest)
    if index == 1:
        print(*(child.pid for child in multiprocessing.active_children()), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    source_files.PART_ROWS, engine.SHARD_PARTS = 5, 2
    unfinished.Unfinished.save = save_and_die
    prepare.main(sys.argv[1:])
"""


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_workers_end_with_a_killed_parent_and_the_next_run_continues(
    tmp_path, files, target, preparation, small_parts
):
    script, directory = tmp_path / "script.py", tmp_path / "data"
    script.write_text(SCRIPT)
    arguments = [f"target={target}", f"input={files[0]},{files[1]}", f"output={directory}", "workers=2"]
    command = [sys.executable, str(script), *arguments, "max_length=200"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert process.returncode == -signal.SIGKILL, process.stderr
    workers = process.stdout.splitlines()[-1].split()
    assert len(workers) == 2
    patience_s = time.monotonic() + 30
    while any(map(is_running, workers)) and time.monotonic() < patience_s:
        time.sleep(0.1)
    assert not any(map(is_running, workers))
    assert not directory.exists()
    sides = sorted(file.name for file in (tmp_path / "data.partial").glob("shard-*"))
    assert sides == ["shard-00000.npz", "shard-00001.npz"]
    prepare_records(files, directory, preparation=preparation)
    prepare_records(files, tmp_path / "whole", preparation=preparation)
    assert contents(directory) == contents(tmp_path / "whole")


def other_content(files, **_):
    files[1].write_text(files[1].read_text().replace("alpha", "omega"))


def other_files(files, **_):
    del files[1]


def other_order(files, **_):
    files.reverse()


def other_options(changes, **_):
    changes |= {"max_length": 99, "last_turn_only": True}


def other_arguments(changes, **_):
    changes["arguments"] = {"enable_thinking": False}


def other_stop_tokens(changes, **_):
    changes["stop_tokens"] = (END, START)


def other_template(changes, target, **_):
    changes["tokenizer"] = load_tokenizer(target)
    changes["tokenizer"].chat_template += " "


def other_tokenizer(changes, target, **_):
    changes["tokenizer"] = load_tokenizer(target)
    changes["tokenizer"].add_tokens(["alpha"])


OTHERS = [
    (other_content, r"source file \S*b.jsonl \(other content\) changed"),
    (other_files, r"source file \S*b.jsonl \(only then\) changed"),
    (other_order, r"source file 1 \(then \S*a.jsonl, now \S*b.jsonl\) changed"),
    (other_options, r"max_length \(then 200, now 99\); last_turn_only \(then False, now True\) changed"),
    (other_arguments, r"the chat template's arguments \(then \{\}, now \{'enable_thinking': False\}\) changed"),
    (other_stop_tokens, r"the stop tokens \(then \[256\], now \[256, 257\]\) changed"),
    (other_template, "the chat template changed"),
    (other_tokenizer, "the tokenizer changed"),
]


@pytest.mark.parametrize(("change", "message"), OTHERS)
@pytest.mark.parametrize("is_complete", [True, False])
def test_records_of_something_else_are_refused(
    tmp_path, files, target, preparation, small_parts, monkeypatch, change, message, is_complete
):
    with monkeypatch.context() as patch:
        if not is_complete:
            patch.setattr(unfinished, "write_index", None)
        try:
            prepare_records(files, tmp_path / "data", preparation=preparation)
        except TypeError:
            assert not is_complete
    made = tmp_path / ("data" if is_complete else "data.partial")
    before, changes = sorted(made.rglob("*")), {}
    change(files=files, changes=changes, target=target)
    refusal = "holds other records" if is_complete else "is the beginning of other records"
    with pytest.raises(UserError, match=rf"{made.name} {refusal}: {message}"):
        prepare_records(files, tmp_path / "data", preparation=dataclasses.replace(preparation, **changes))
    assert sorted(made.rglob("*")) == before


def test_a_shard_of_another_size_is_not_continued(tmp_path, files, preparation, small_parts, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(unfinished, "write_index", None)
        with pytest.raises(TypeError):
            prepare_records(files, tmp_path / "data", preparation=preparation)
    monkeypatch.setattr(prepare, "SHARD_PARTS", 3)
    with pytest.raises(UserError, match=r"how files are cut \(then \{.*'parts': 2, .* now \{.*'parts': 3, "):
        prepare_records(files, tmp_path / "data", preparation=preparation)


def test_a_folder_that_is_there_is_recognised_wherever_its_sources_lie(tmp_path, files, preparation, monkeypatch):
    first = prepare_records(files, tmp_path / "data", preparation=preparation)
    before = contents(tmp_path / "data")
    (tmp_path / "moved").mkdir()
    moved = [file.rename(tmp_path / "moved" / file.name) for file in files]
    monkeypatch.setattr(prepare, "read_parts", None)
    second = prepare_records(moved, tmp_path / "data", preparation=preparation)
    assert second.digest == first.digest
    assert contents(tmp_path / "data") == before


def test_an_empty_folder_is_filled_and_any_other_is_not_touched(tmp_path, files, preparation):
    (tmp_path / "empty").mkdir()
    assert len(prepare_records(files, tmp_path / "empty", preparation=preparation)) == 38
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match=r"mine lacks manifest.json"):
        prepare_records(files, tmp_path / "mine", preparation=preparation)
    assert contents(tmp_path / "mine") == {"thesis.tex": b"x"}
