"""What a preparation cannot go on with is one error that names it, and work that was done is kept."""

import dataclasses
import errno
import json
import os

import failing
import pytest
import tiny_runs

from dflash_jax.chat.chat import Chat
from dflash_jax.chat.tokenizer import load_tokenizer
from dflash_jax.data import prepare, unfinished
from dflash_jax.data.origin import Preparation, check_origin
from dflash_jax.data.prepare import prepare_records, refuse_mask_token
from dflash_jax.errors import UserError
from dflash_jax.sources import files as source_files


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    path = tmp_path_factory.mktemp("target")
    tiny_runs.save_tokenizer(path)
    return path


@pytest.fixture
def preparation(target):
    tokenizer = load_tokenizer(target)
    return Preparation(tokenizer, (tokenizer.eos_token_id,), {}, max_length=200)


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Twenty rows, five to a part, two parts to a shard."""
    monkeypatch.setattr(source_files, "PART_ROWS", 5)
    monkeypatch.setattr(prepare, "SHARD_PARTS", 2)
    return tiny_runs.write_conversations(tmp_path / "a.jsonl", 20, seed=1)


def contents(directory):
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def test_rows_of_which_none_can_be_used(tmp_path, preparation):
    file = tmp_path / "a.jsonl"
    file.write_text('{"messages": []}\n\n{\n{"messages": [1]}\n')
    message = (
        r"a.jsonl can be used: 2 bad message, 1 not JSON. The first: \S*a.jsonl:1, bad message: messages is an"
    )
    with pytest.raises(UserError, match=message):
        prepare_records([file], tmp_path / "data", preparation=preparation)
    file.write_text("\n")
    with pytest.raises(UserError, match=r"There are no rows in \S*a.jsonl"):
        prepare_records([file], tmp_path / "data", preparation=preparation)
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("place", "name", "calls", "fault"),
    [
        # As ArrayRecord says it.
        (prepare.ShardWriter, "write", 2, RuntimeError("write() failed: No space left on device")),
        (prepare.ShardWriter, "close", 1, RuntimeError("write() failed: No space left on device")),
        (unfinished.os, "fsync", 3, OSError(errno.ENOSPC, "No space left on device")),
        (unfinished, "write_index", 0, OSError(errno.EDQUOT, "Disk quota exceeded")),
    ],
)
def test_a_full_disk_is_named_and_the_command_continues(
    tmp_path, file, preparation, monkeypatch, place, name, calls, fault
):
    with monkeypatch.context() as patch:
        patch.setattr(place, name, failing.after(calls, getattr(place, name), fault))
        with pytest.raises(UserError, match=rf"Cannot write to \S*data.partial: .*{str(fault)[-20:]}.*continues"):
            prepare_records([file], tmp_path / "data", preparation=preparation)
    prepare_records([file], tmp_path / "data", preparation=preparation)
    prepare_records([file], tmp_path / "whole", preparation=preparation)
    assert contents(tmp_path / "data") == contents(tmp_path / "whole")


def test_a_place_that_cannot_be_written(tmp_path, file, preparation):
    (tmp_path / "data.partial").write_text("a file")
    with pytest.raises(UserError, match=r"Cannot write to \S*data.partial: .*"):
        prepare_records([file], tmp_path / "data", preparation=preparation)


def test_a_worker_that_dies(tmp_path, file, preparation):
    class Deadly(type(preparation.tokenizer)):
        """Ends the process that unpickles it."""

        def __reduce__(self):
            return os._exit, (1,)

    preparation.tokenizer.__class__ = Deadly
    with pytest.raises(UserError, match=r"A worker process died, most likely because memory ran out.*continues"):
        prepare_records([file], tmp_path / "data", preparation=preparation, workers=2)
    assert (tmp_path / "data.partial").is_dir()


def test_two_runs_do_not_write_to_one_folder(tmp_path, file, preparation):
    def another(*_):
        with pytest.raises(UserError, match=r"Another process writes to \S*data.partial"):
            prepare_records([file], tmp_path / "data", preparation=preparation)
        refused.append(True)

    refused = []
    records = prepare_records([file], tmp_path / "data", preparation=preparation, on_progress=another)
    assert (len(records), len(refused)) == (20, 4)


def test_a_source_that_changes_while_it_is_read(tmp_path, file, preparation):
    def grow(*_):
        with file.open("a") as out:
            out.write("\n")

    with pytest.raises(UserError, match="was changed while it was read"):
        prepare_records([file], tmp_path / "data", preparation=preparation, on_progress=grow)
    assert list(tmp_path.iterdir()) == [file]


def test_a_bug_is_no_unused_row(tmp_path, file, preparation, monkeypatch):
    monkeypatch.setattr(Chat, "encode", lambda *_, **__: {}["nothing"])
    with pytest.raises(KeyError, match="nothing"):
        prepare_records([file], tmp_path / "data", preparation=preparation)


def test_prepared_records_are_trained_with_their_own_tokenizer_and_template_only(
    tmp_path, file, preparation, target
):
    records = prepare_records([file], tmp_path / "data", preparation=preparation)
    check_origin(records, dataclasses.replace(preparation, max_length=10, stop_tokens=(1,)))
    with pytest.raises(
        UserError, match=r"another chat template \(\w{12}, arguments \{\}\) .* arguments \{'a': 1\}\)"
    ):
        check_origin(records, dataclasses.replace(preparation, arguments={"a": 1}))
    other = load_tokenizer(target)
    other.add_tokens(["alpha"])
    with pytest.raises(
        UserError, match=r"data was prepared with another tokenizer \(\w{12}, 258 tokens\) .* 259 "
    ):
        check_origin(records, dataclasses.replace(preparation, tokenizer=other))


def test_a_mask_token_that_occurs_is_refused(tmp_path, preparation):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"input_ids": [3, 4, 4], "loss_mask": [0, 1, 1]}))
    records = prepare_records([file], tmp_path / "data", preparation=preparation)
    for absent in (2, 5):
        refuse_mask_token(records, absent)
    with pytest.raises(UserError, match=r"drafter.mask_token: token 4 occurs 2 times in \S*data; name a token"):
        refuse_mask_token(records, 4)
