"""The evaluate command: drafters side by side from end to end, its files, its exit status, and what it refuses."""

import json
import struct

import numpy as np
import pytest
import tiny_runs
from tensorboardX.proto.event_pb2 import Event
from tiny_models import random_drafter, save_drafter

from dflash_jax import evaluate
from dflash_jax.data.prepare import prepare_records
from dflash_jax.decode.ways import CHAIN, PLAIN, Limits, Rounds
from dflash_jax.drafters import open_run
from dflash_jax.errors import UserError
from dflash_jax.models.drafter import FULL

SMALL = ("drafter.taps=[0,1]", "drafter.layers=1", "mesh=one")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    root = tmp_path_factory.mktemp("evaluations")
    return tiny_runs.save_recipe(root, tiny_runs.save_chat_llama(root / "llama", num_hidden_layers=3))


@pytest.fixture(scope="module")
def run(recipe):
    return tiny_runs.save_run(recipe, "ours", *SMALL, steps=(3,))


@pytest.fixture(scope="module")
def folder(recipe):
    drafter = random_drafter(1, layer_types=(FULL,), window=None)
    return save_drafter(recipe.root / "theirs", drafter, taps=(0, 1))


@pytest.fixture(scope="module")
def prompts(recipe):
    return tiny_runs.write_conversations(recipe.root / "asked.jsonl", 6, seed=9)


def board(run):
    """TensorBoard's points of a run: length (8 bytes), its CRC (4), data, CRC (4)."""
    found = {}
    for file in sorted((run / "tensorboard").iterdir()):
        content, start = file.read_bytes(), 0
        while start < len(content):
            (length,) = struct.unpack_from("<Q", content, start)
            event = Event.FromString(content[start + 12 : start + 12 + length])
            found |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
            start += 16 + length
    return found


def test_two_drafters_are_compared_with_one_command(run, folder, prompts, capsys):
    arguments = [f"run={run}", f"drafter={folder}", f"prompts={prompts}", "limit=2", "decode=tree,chain,plain"]
    assert evaluate.main([*arguments, "budget=6", "max_new_tokens=8", "batch_size=2"]) == 0
    shown = capsys.readouterr().out
    content = json.loads((run / "report" / "evaluation.json").read_text())

    assert content["settings"]["budget"] == "6"
    assert content["target"]["name"] == "llama"
    ours, theirs = content["drafters"]
    assert (ours["name"], ours["step"], ours["block_size"], ours["layers"]) == ("ours", 3, 4, 1)
    assert (theirs["name"], theirs["step"], theirs["block_size"], theirs["dtype"]) == (
        "theirs",
        None,
        5,
        "float32",
    )
    assert ours["digest"] != theirs["digest"]
    assert content["packages"]["jax"]

    named = [(None, "plain"), ("ours", "chain"), ("ours", "tree 6"), ("theirs", "chain"), ("theirs", "tree 6")]
    assert [item["set"] for item in content["sets"]] == ["set-0", "set-1", "all"]
    for item in content["sets"]:
        assert item["prompts"] == (4 if item["set"] == "all" else 2)
        assert [(way["drafter"], way["decoding"]) for way in item["ways"]] == named
        own = [each for each in content["prompts"] if item["set"] in ("all", each["set"])]
        for number, way in enumerate(item["ways"]):
            answers = [each["answers"][number] for each in own]
            assert way["tokens"] == sum(answer["tokens"] for answer in answers)
            assert way["rounds"] == sum(len(answer["accepted"]) for answer in answers)
            assert way["rounds"] == sum(way["rounds_by_tokens"])
            if way["drafter"]:
                assert way["compared"] == way["identical"] == item["prompts"]
                assert way["accept_len"] == pytest.approx((way["tokens"] - item["prompts"]) / way["rounds"])
                assert way["simulated"]["walk_tau"] == pytest.approx(way["accept_len"])
                assert way["ratio"] == pytest.approx(way["tokens_s"] / item["ways"][0]["tokens_s"])

    assert shown.count("theirs against ours: chain ") == 3
    assert "tree 6" in shown.splitlines()[-4]
    for picture in ("decoding.png", "training.png"):
        assert (run / "report" / picture).read_bytes()[16:24] == struct.pack(">II", 1600, 500)
    points = board(run)
    *_, everywhere = content["sets"]
    assert points["decode/all/chain/accept_len", 3] == pytest.approx(everywhere["ways"][1]["accept_len"])
    assert points["decode/all/theirs/tree6/accept_len", 3] == pytest.approx(everywhere["ways"][4]["accept_len"])
    assert points["decode/set-0/plain/tokens_s", 3] > 0


class Canned:
    """Stands in for decoding: every answer is tokens 1, 2, 3 and, where a chain is asked for, `chained`."""

    chained = (1, 2, 3)
    asked = ()

    def __init__(self, target, speculators, mesh, *, limits: Limits):
        self.size, self.sampling = limits.batch_size, limits.sampling
        type(self).asked = ()
        type(self).speculators, type(self).ways = speculators, []

    def __call__(self, way, batch):
        count = batch.count
        type(self).ways.append(way)
        rows = [batch.tokens[row, : batch.lengths[row]].tolist() for row in range(count)]
        type(self).asked += tuple(rows) if way.kind == PLAIN else ()
        said = np.array(self.chained if way.kind == CHAIN else (1, 2, 3), np.int32)
        rounds = [np.array([1], np.int32) if way.drafter else np.zeros(0, np.int32)] * count
        return Rounds([said] * count, rounds, [played + 1 for played in rounds], seconds=0.5)


@pytest.fixture
def canned(monkeypatch):
    monkeypatch.setattr(evaluate, "Decoding", Canned)
    return monkeypatch


@pytest.mark.parametrize(
    ("chained", "temperature", "status", "said"),
    [
        ((1, 2, 3), "0", 0, "2/2"),
        ((1, 7, 3), "0", 1, "0/2, 2 DIFFERENT"),
        ((1, 2), "0", 1, "0/2, 2 DIFFERENT"),
        ((1, 7, 3), "1", 0, "in distribution"),
    ],
    ids=["same", "other token", "shorter", "at a temperature"],
)
def test_the_exit_status_says_whether_greedy_text_was_kept(
    canned, run, prompts, capsys, chained, temperature, status, said
):
    canned.setattr(Canned, "chained", chained)
    arguments = [f"run={run}", f"prompts={prompts}", "limit=1", f"temperature={temperature}", "simulate=false"]
    assert evaluate.main(arguments) == status
    shown = capsys.readouterr().out
    lines = [line for line in shown.splitlines() if " chain " in line and "x  " in line]
    assert lines[-1].endswith(f"x  {said}")
    assert shown.count("DIFFERENT: ours chain, prompt ") == (2 if status else 0)


def test_a_tie_is_said_and_no_fault(canned, run, prompts, capsys):
    canned.setattr(Canned, "chained", (1, 7, 3))
    canned.setattr("dflash_jax.evaluation.difference.TIE", {"float32": 1e6})
    assert evaluate.main([f"run={run}", f"prompts={prompts}", "limit=1", "simulate=false"]) == 0
    shown = capsys.readouterr().out
    assert "0/2, 2 ties" in shown
    assert shown.count("tie: ours chain, prompt ") == 2


def test_held_out_records_are_asked_where_there_are_no_conversations(canned, recipe, run):
    prepared = recipe.root / "prepared"
    preparation = open_run(run, key="run").preparation
    prepare_records([recipe.root / "heldout.jsonl"], prepared, preparation=preparation, workers=1)
    other = tiny_runs.save_run(recipe, "prepared-run", *SMALL, f"data.heldout={prepared}")
    assert evaluate.main([f"run={other}", "decode=plain"]) == 0
    from_records = Canned.asked
    assert evaluate.main([f"run={run}", "decode=plain"]) == 0
    assert sorted(from_records) == sorted(Canned.asked)
    assert len(from_records) == 7


def test_without_a_run_a_report_is_written_where_it_is_asked_for(
    canned, recipe, folder, prompts, tmp_path, capsys
):
    target = [f"target={recipe.root / 'llama'}", f"drafter={folder}", f"prompts={prompts}", "dtype=float32"]
    assert evaluate.main([*target, "decode=chain"]) == 0
    shown = capsys.readouterr().out
    assert "written" not in shown
    assert "  -  -" in shown  # neither ratio nor comparison without plain decoding
    assert evaluate.main([*target, "decode=chain", f"report={tmp_path / 'a' / 'b'}"]) == 0
    assert sorted(file.name for file in (tmp_path / "a" / "b").iterdir()) == ["decoding.png", "evaluation.json"]
    content = json.loads((tmp_path / "a" / "b" / "evaluation.json").read_text())
    assert [drafter["name"] for drafter in content["drafters"]] == ["theirs"]
    assert content["sets"][-1]["ways"][0]["ratio"] is None


def test_a_narrower_block_is_drafted_where_it_is_asked_for(canned, run, prompts):
    assert evaluate.main([f"run={run}", f"prompts={prompts}", "block_size=2", "simulate=false"]) == 0
    content = json.loads((run / "report" / "evaluation.json").read_text())
    assert content["sets"][-1]["ways"][1]["slots"] == 2


def test_cheaper_drafting_is_passed_on(canned, recipe, run, prompts):
    preparation = open_run(run, key="run").preparation
    records = prepare_records(
        [recipe.root / "train.jsonl"], run / "data" / "train", preparation=preparation, workers=1
    )
    options = ["draft_vocab=9", "min_accept=0.25", "limit=1", "simulate=false"]
    assert evaluate.main([f"run={run}", f"prompts={prompts}", *options]) == 0
    _, supervised = records.token_counts()
    most = np.argsort(-supervised, kind="stable")[:9]
    assert Canned.speculators["ours"].frozen.draft_tokens.tolist() == sorted(most.tolist())
    assert {(way.kind, way.min_accept) for way in Canned.ways} == {(PLAIN, 0.0), (CHAIN, 0.25)}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["drafter={folder}"], "run, target: found neither; give one of them"),
        (["run={run}", "target={target}"], "run, target: found both"),
        (["run={target}"], "run: .*llama is not a run directory"),
        (
            ["target={target}", "prompts={prompts}"],
            "drafter: a value is required for decode=plain,chain with target=",
        ),
        (["target={target}", "drafter={folder}"], "prompts: a value is required"),
        (["run={run}", "decode=plain,beam"], "decode: found 'beam', allowed: plain, chain, tree"),
        (["run={run}", "budget=15,0"], "budget: found '0', allowed: numbers from 1 to 1024"),
        (["run={run}", "budget=many"], "budget: found 'many'"),
        (["run={run}", "top_p=0.5"], "top_p: found 0.5, but temperature=0"),
        (["run={run}", "top_k=5"], "top_k: found 5, but temperature=0"),
        (
            ["target={target}", "drafter={folder}", "prompts={prompts}", "draft_vocab=9"],
            "draft_vocab: found 9, but only run= has data to count tokens in",
        ),
        (["run={run}", "block_size=5"], "block_size: found 5, but .*ours drafts blocks of at most 4"),
        (
            ["run={run}", "min_accept=3.5"],
            "min_accept: found 3.5, but .*ours drafts 3 tokens at a time, .*set at most 3",
        ),
        (["run={run}", "step=99"], r"step: found '99', allowed: latest, best, or a saved step \(3\)"),
        (["run={run}", "drafter={run}"], "drafter: .*ours is named twice"),
        (["run={run}", "drafter=/nowhere"], "drafter: /nowhere is neither a run directory"),
        (["run={run}", "prompts=humanevil"], "prompts: found 'humanevil'; known by name: humaneval, mt-bench"),
        (["run={run}", "mesh=cpu9"], "mesh: nothing named 'cpu9'"),
    ],
)
def test_what_does_not_go_together_is_refused(recipe, run, folder, prompts, arguments, said):
    places = {"run": run, "folder": folder, "prompts": prompts, "target": recipe.root / "llama"}
    with pytest.raises(UserError, match=rf"^{said}"):
        evaluate.main([argument.format(**places) for argument in arguments])
