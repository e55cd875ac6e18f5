"""The briefing before a run: its figures by hand, its memory against real arrays, its warnings one by one."""

import collections
import dataclasses
import pathlib
import re
from typing import Any

import jax
import numpy as np
import pytest
import tiny_records
import tiny_runs
from flax import nnx

from dflash_jax.arguments import build, parse_assignments, read_yaml
from dflash_jax.chat.chat import Encoded
from dflash_jax.config import MeshLayout, MeshPart, Recipe
from dflash_jax.data.records import Records
from dflash_jax.dataset import Dataset, training_data
from dflash_jax.experiment import Experiment
from dflash_jax.mesh import Meshes, make_meshes
from dflash_jax.training.briefing import Briefing, briefing
from dflash_jax.training.bucket_figures import bucket_figures
from dflash_jax.training.device_bytes import Machine, memory_by_device
from dflash_jax.training.optim import learning_rate, make_optimizer
from dflash_jax.training.programs import make_programs
from dflash_jax.training.state import TrainState

# Rows of 128 and of 192 tokens, six of each in a batch: 4 and 5 batches.
LENGTHS = {100: 24, 180: 30}
MODEL = {"mlp": "model"}
CPU = Machine("cpu", 8, {})
CPU8 = MeshLayout(
    MeshPart([0, 1, 2, 3, 4, 5], {"data": 6}, {}), MeshPart([6], {"data": 1}, {}), device_count=8, platform="cpu"
)


@dataclasses.dataclass(frozen=True)
class Desk:
    """Where runs of the tiny recipe are planned."""

    recipe: tiny_runs.TinyRecipe
    folder: pathlib.Path
    states: dict[tuple[str, str], TrainState] = dataclasses.field(default_factory=dict)

    def opened(self, *changes: str) -> Experiment:
        sizes = ("drafter.taps=[0]", "drafter.layers=1")
        given = parse_assignments(self.recipe.arguments("run", *sizes, *changes))
        del given["recipe"]
        file = self.recipe.file
        return Experiment.open(build(Recipe, [(str(file), read_yaml(file)), ("command line", given)]))

    def data(self, experiment: Experiment, meshes: Meshes, lengths: dict[int, int]) -> Dataset:
        """Records of so many tokens each, the later half of them trained: length -> count."""
        name = "-".join(f"{length}x{count}" for length, count in lengths.items())
        if not (self.folder / name).exists():
            halves = {length: np.arange(length) >= length // 2 for length in lengths}
            rows = [
                Encoded(np.full(length, 5, np.int32), halves[length])
                for length, count in lengths.items()
                for _ in range(count)
            ]
            tiny_records.write(self.folder / name, rows, template_arguments={"enable_thinking": False})
        records = Records.open(self.folder / name)
        return training_data(experiment, records, meshes=meshes)

    def brief(
        self,
        *changes: str,
        lengths: dict[int, int] = LENGTHS,
        layout: MeshLayout = CPU8,
        machine: Machine = CPU,
    ) -> Briefing:
        """What is said of the tiny recipe with these changes."""
        experiment, meshes = self.opened(*changes), make_meshes(layout, "tiny")
        data = self.data(experiment, meshes, lengths)
        steps = experiment.recipe.train.steps
        assert steps is not None
        # Its shapes follow from the drafter's sizes, which no change here touches.
        key = str(meshes.drafter), str(meshes.drafter_rules)
        if key not in self.states:
            self.states[key] = planned(experiment, meshes)
        held_out = data if experiment.recipe.data.heldout else None
        return briefing(
            experiment,
            data,
            steps=steps,
            state=self.states[key],
            meshes=meshes,
            held_out=held_out,
            machine=machine,
        )


def planned(experiment: Experiment, meshes: Meshes) -> TrainState:
    """Shapes and shardings of the train state."""
    optim = experiment.recipe.optim
    return make_programs(experiment, meshes, make_optimizer(optim, learning_rate(optim, 20))).abstract


@pytest.fixture(scope="module")
def desk(tmp_path_factory) -> Desk:
    return furnished(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.fixture(scope="module")
def tied_desk(tmp_path_factory) -> Desk:
    return furnished(tmp_path_factory.mktemp("tied"), tied=True)


def furnished(root: pathlib.Path, *, tied: bool) -> Desk:
    """With a target of two layers."""
    target = tiny_runs.save_chat_llama(root / "llama", num_hidden_layers=2, tie_word_embeddings=tied)
    return Desk(tiny_runs.save_recipe(root, target), root)


def fact(told: Briefing, label: str) -> str:
    """What stands beside a label, in one line."""
    lines = list(told.lines)
    start = next(number for number, line in enumerate(lines) if line.startswith(f"{label} "))
    more = next((n for n in range(start + 1, len(lines)) if not lines[n].startswith(" ")), len(lines))
    return " ".join(" ".join([lines[start].removeprefix(label), *lines[start + 1 : more]]).split())


def says(told: Briefing, warning: str | None) -> None:
    """That there is this one warning, or none."""
    assert [bool(re.search(warning or "", found)) for found in told.warnings] == ([True] if warning else [])


def bytes_on_devices(tree: Any) -> collections.Counter[int]:
    """Bytes of all arrays by device, each piece of memory once, however many arrays share it."""
    shards = {
        (shard.device.id, shard.data.unsafe_buffer_pointer()): shard.data.nbytes
        for array in jax.tree.leaves(tree)
        for shard in array.addressable_shards
    }
    found = collections.Counter()
    for (device, _), size in shards.items():
        found[device] += size
    return found


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ("", None),
        # exp(-14 / 4) and exp(-14 / 7): the weights of the last of fifteen slots.
        (
            "drafter.block_size=16 objective.gamma=4",
            r"^objective\.gamma: 4 weighs the last slot 0\.030 instead of 0\.135; 7 is usual for block 16",
        ),
        ("drafter.block_size=16", None),
        ("drafter.block_size=16 objective.gamma=7", None),
        ("drafter.block_size=16 objective.gamma=10", None),  # suits trees
        ("drafter.block_size=10 objective.gamma=10", r"0\.449 instead of 0\.202; 5 is usual for block 10"),
        ("drafter.block_size=8 objective.gamma=7", r"0\.424 instead of 0\.223; 4 is usual for block 8"),
        ("drafter.block_size=16 objective.gamma=4 objective.slot_weights=uniform", None),
        ("objective.gamma=1", None),  # nothing is published for blocks of 4
        ("objective.terms.kl=1", r"^objective\.terms: kl without ce.*add objective\.terms\.ce=1"),
        ("objective.terms.kl=1 objective.terms.ce=0.5", None),
        ("objective.noise_peak=0.1", r"^objective\.noise_peak: noise of up to 0\.1 .*noise_peak=0"),
        ("objective.noise_end=0.2", r"up to 0\.2 "),
        ("optim.b2=0.999", r"^optim\.b1, optim\.b2: 0\.9 and 0\.999 average over 1000 steps; 0\.9 and 0\.95"),
        ("optim.b1=0.8", r": 0\.8 and 0\.95 average over 20 steps"),
        ("optim.lr=0.0031", r"^optim\.lr: 0\.0031 is high.*6e-4 is usual"),
        ("optim.lr=0.003", None),
        ("optim.lr=0 optim.warmup=0", r"^optim\.lr: 0 learns nothing"),
        ("optim.warmup=0", r"^optim\.warmup: 0 of 20 steps is none"),
        ("optim.warmup=0.02", r"^optim\.warmup: 0\.02 of 20 steps is none.*0\.04 is usual"),
        ("train.steps=8", r"^train\.steps: 8 steps see 89% of the data; 9 see all of it once"),
        ("train.steps=9", None),
        ("train.steps=8 train.accumulate=2", None),
        ("data.heldout=null", r"^data\.heldout: there is none, so that no best checkpoint is kept"),
        ("eval.every=0", r"^eval\.every: 0 is never, so that no best checkpoint is kept"),
        ("checkpoint.every=19", None),
        ("checkpoint.every=20", r"^checkpoint\.every: 20 of 20 steps saves the last step only.*set it to 2 "),
        # 7,800 tokens, one tap of 36 channels, four bytes each; a teacher's state has 36 channels more.
        (
            "pipeline.feature_cache_gib=0",
            r"computes 1\.07 MiB of features anew in each of 2\.22 passes; .*_gib=1 or ",
        ),
        ("pipeline.feature_cache_gib=0 objective.terms.kl=1 objective.terms.ce=1", r"computes 2\.14 MiB"),
        ("pipeline.feature_cache_gib=0 train.steps=17", None),  # not two passes
        ("pipeline.feature_cache_gib=0 data.features=hybrid", None),
        ("pipeline.feature_cache_gib=0 data.features_gib=0.001", None),  # they would not fit
        ("data.buckets=[128]", r"^data\.max_length: 56% of the records exceed 128 tokens and are left out"),
        ("data.batching=sorted", r"^data\.batching: sorted trains on short texts first"),
        ("data.batching=random", None),  # 24.8 % padding, and one shape
    ],
)
def test_what_is_unusual_is_said_with_its_remedy(desk, changes, warning):
    says(desk.brief(*changes.split()), warning)


@pytest.mark.parametrize(
    ("lengths", "buckets", "warning"),
    [
        # 1, 1 and 6 batches.
        ({60: 18, 100: 6, 180: 36}, "[64,128,192]", r"^data\.buckets: 75% of the batches are of 192 .*auto:6$"),
        # 2, 2 and 4 batches: half is not more than half.
        ({60: 36, 100: 12, 180: 24}, "[64,128,192]", None),
        # 1 and 10 batches: one of two has most of them anyway, but not so many in a row.
        ({100: 6, 180: 60}, "[128,192]", r"^data\.buckets: 91% of the batches .*up to 5 in a row"),
        ({100: 12, 180: 36}, "[128,192]", None),
        # 54 rows of 192 tokens for 54 records of 140: 27 % padding.
        ({140: 54}, "[192]", r"^data\.buckets: 27% of the tokens, and of the time, are padding; .*packed"),
        ({145: 54}, "[192]", None),
        # 5 % of the records may be left out.
        ({120: 57, 180: 3}, "[128]", None),
        ({120: 56, 180: 4}, "[128]", r"^data\.max_length: 7% of the records exceed 128 tokens"),
    ],
)
def test_batches_that_are_unusual_are_named(desk, lengths, buckets, warning):
    says(desk.brief(f"data.buckets={buckets}", lengths=lengths), warning)


def test_several_warnings_stand_below_the_facts(desk):
    told = desk.brief("optim.b2=0.999", "objective.noise_peak=0.1", "checkpoint.every=50")
    assert len(told.warnings) == 3
    lines = told.text.splitlines()
    assert tuple(lines[: len(told.lines)]) == told.lines
    assert [line[:9] for line in lines[len(told.lines) :] if line[0] != " "] == ["warning  "] * 3
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize(
    ("machine", "changes", "warning"),
    [
        (Machine("gpu", 8, {}), "target.dtype=bfloat16 drafter.dtype=bfloat16", None),
        (Machine("gpu", 8, {}), "drafter.dtype=bfloat16", r"^target\.dtype: float32 on a gpu"),
        (Machine("tpu", 8, {}), "", r"^target\.dtype, drafter\.dtype: float32 on a tpu"),
        (
            Machine("gpu", 9, {}),
            "target.dtype=bfloat16 drafter.dtype=bfloat16",
            r"^mesh: tiny leaves 2 of 9 devices",
        ),
    ],
)
def test_what_wastes_an_accelerator_is_named(desk, machine, changes, warning):
    says(desk.brief("mesh=tiny", *changes.split(), machine=machine), warning)


def test_weights_that_hardly_fit_a_device_are_named(desk):
    halves = ("mesh=tiny", "target.dtype=bfloat16", "drafter.dtype=bfloat16")
    experiment, meshes = desk.opened(*halves), make_meshes(CPU8, "tiny")
    taken = memory_by_device(experiment, state=planned(experiment, meshes), meshes=meshes)[6].total
    told = desk.brief(*halves, machine=Machine("gpu", 8, {0: 2**40, 6: int(taken / 0.89), 7: 1}))
    assert told.warnings == ()
    assert fact(told, "memory").startswith("a device of ")
    says(
        desk.brief(*halves, machine=Machine("gpu", 8, {0: 2**40, 6: int(taken / 0.91)})), r"weights alone take 91%"
    )


def test_a_mesh_axis_that_splits_nothing_is_named(desk):
    part = MeshPart([6, 7], {"data": 1, "model": 2}, {})
    idle, used = (
        dataclasses.replace(CPU8, drafter=dataclasses.replace(part, rules=rules)) for rules in ({}, MODEL)
    )
    says(desk.brief(layout=idle), r"^mesh: cpu8 splits nothing of the drafter over its axis model.*drafter\.rules")
    says(desk.brief(layout=used), None)


def test_the_facts_by_hand(desk):
    changes = ("optim.lr=0.001", "optim.warmup=0.04", "train.steps=1000", "drafter.block_size=16")
    noise = ("objective.noise_peak=0.1", "objective.noise_end=0.02", "drafter.mask_token=65", "train.accumulate=2")
    told = desk.brief(*changes, *noise)
    # 460 of 960 steps after warm-up: (1 + cos(0.4792 pi)) / 2 = 0.5327.
    assert (
        fact(told, "lr")
        == "0 at step 0, 0.001 at 40, 0.000533 at 500, 0 at 1,000; warm-up of 40 steps, then cosine"
    )
    # 460 of 959 steps, for the last one is step 999: 0.1 - 0.08 * 0.4797.
    assert fact(told, "noise").startswith(
        "0 at step 0, 0.1 at 40, 0.0616 at 500, 0.02 at 1,000; warm-up of 40 steps"
    )
    # exp(-1 / 7) .. exp(-14 / 7)
    assert fact(told, "slots") == "1 to 15 weigh 1, 0.867, 0.751, 0.651, .., 0.18, 0.156, 0.135"
    assert fact(told, "block") == f"16 slots, MASK is token 65: {desk.opened().tokenizer.decode([65])!r}"
    assert fact(told, "adamw").startswith(
        "betas 0.9 and 0.95, eps 1e-08, weight decay 0, gradients clipped to norm 1"
    )
    assert fact(told, "run").startswith("1,000 steps of 2 batches, 222 passes over 9 batches, features online")
    assert fact(told, "template") == "enable_thinking=False"
    assert fact(told, "data") == "54 records, 0 left out as too long; 7,800 tokens, 3,900 of them trained"
    assert fact(told, "target").endswith("2 layers, float32, on cpu 0-5 (data 6)")
    assert fact(told, "eval") == "every 10 steps on 54 held-out records"
    assert "the last 2 and the best kept" in fact(told, "saves")


def test_mask_past_the_tokenizer_has_no_text(desk):
    assert re.fullmatch(
        r"4 slots, MASK is token (\d+): past the tokenizer's \1 tokens", fact(desk.brief(), "block")
    )


def test_the_table_of_the_buckets_by_hand(desk):
    table = [line.split() for line in desk.brief().lines if re.match(r" +(\d+|all)  ", line)]
    assert table == [
        ["128", "6", "24", "44.4%", "4", "44.4%", "2,400", "21.9%"],
        ["192", "6", "30", "55.6%", "5", "55.6%", "5,400", "6.2%"],
        ["all", "54", "9", "7,800", "11.7%"],
    ]


@pytest.mark.parametrize("batching", ["bucketed", "sorted", "packed", "random"])
def test_the_buckets_hold_every_record_and_every_batch(desk, batching):
    meshes, experiment = make_meshes(CPU8, "tiny"), desk.opened(f"data.batching={batching}", "data.buckets=[128]")
    data = desk.data(experiment, meshes, {30: 25, 100: 24, 180: 3})
    (only,) = bucket_figures(data)
    assert (only.records, only.tokens, only.batches) == (49, 3150, data.plan.batches_per_epoch)
    walked = [data.plan[index] for index in range(data.plan.batches_per_epoch)]
    assert only.held == sum(128 * len(batch.record_ids) for batch in walked)


SPLIT = MeshLayout(
    MeshPart([0, 1, 2, 3], {"data": 2, "model": 2}, MODEL | {"vocab": "model"}),
    MeshPart([5, 6], {"data": 1, "fsdp": 2}, {"embed": "fsdp"}),
    device_count=8,
)
ONE = MeshLayout(MeshPart([0], {"data": 1}, {}), MeshPart([0], {"data": 1}, {}), device_count=1)


@pytest.mark.parametrize(
    ("at", "layout", "changes"),
    [
        ("desk", CPU8, ""),
        ("desk", CPU8, "target.dtype=bfloat16 drafter.vocab=100"),
        ("desk", SPLIT, "drafter.dtype=bfloat16"),
        ("desk", ONE, ""),  # the drafter uses the target's own arrays
        ("desk", ONE, "target.dtype=bfloat16"),
        ("tied_desk", CPU8, ""),
        ("tied_desk", ONE, "drafter.vocab=100"),
    ],
)
def test_memory_is_that_of_the_real_arrays(request, at, layout, changes):
    desk: Desk = request.getfixturevalue(at)
    experiment, meshes = desk.opened(*changes.split()), make_meshes(layout, "tiny")
    abstract = planned(experiment, meshes)
    found = memory_by_device(experiment, state=abstract, meshes=meshes)
    target = experiment.load_target(meshes.target, meshes.target_rules)
    vocab = experiment.recipe.drafter.vocab
    frozen = experiment.frozen(target, meshes.drafter, None if vocab is None else np.arange(vocab))
    state = jax.tree.map(lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding), abstract)
    weights = bytes_on_devices(nnx.state(target))
    params, moments = bytes_on_devices(state.params), bytes_on_devices(state.opt)
    both = bytes_on_devices((nnx.state(target), frozen.embedding, frozen.head))
    devices = {*meshes.target.devices.flat, *meshes.drafter.devices.flat}
    assert found.keys() == {device.id for device in devices}
    for device, said in found.items():
        assert said.target == weights[device]
        assert said.parameters == said.gradient == params[device]
        assert said.moments == moments[device]
        assert said.ends == both[device] - weights[device]
        assert said.total == both[device] + 2 * params[device] + moments[device]


def test_the_gradients_of_two_batches_take_twice_the_memory(desk):
    experiment, meshes = desk.opened("train.accumulate=2"), make_meshes(CPU8, "tiny")
    found = memory_by_device(experiment, state=planned(experiment, meshes), meshes=meshes)
    assert found[6].gradient == 2 * found[6].parameters > 0
    assert found[0].gradient == 0
