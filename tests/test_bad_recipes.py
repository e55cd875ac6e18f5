"""Bad recipes, mesh files and overrides of `train`, a row of a table each.

Every one ends with exit status 2 and one line that names the key, what was found and what is allowed, before any
weights are read, and without a change to a run that is there already.
"""

import copy
import json
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import jax.numpy as jnp
import optax
import pytest
import tiny_models
import tiny_runs
from bad_arguments import DATA, FORM, LIMITS, TOGETHER
from flax import nnx

from dflash_jax import train
from dflash_jax.arguments import run_entry_point
from dflash_jax.config import Recipe
from dflash_jax.dataset import open_records
from dflash_jax.experiment import Experiment
from dflash_jax.models.drafter import FULL
from dflash_jax.published.targets import TargetFiles
from dflash_jax.training.checkpoint import Checkpoints
from dflash_jax.training.state import TrainState

ASKED = {"role": "user", "content": "hi"}
SIZES = {"mask_token": 260, "layer_types": (FULL, FULL), "window": None, "block_size": 4}


@pytest.fixture(scope="module")
def root(recipe) -> pathlib.Path:
    """Beside the recipe: a run with two checkpoints and its data, and files that are of no use."""
    root = recipe.root
    run = root / "run"
    state = TrainState(jnp.zeros((), jnp.int32), nnx.State({}), optax.EmptyState(), jnp.zeros(1))
    with Checkpoints(run / "checkpoints", keep=2, warn=print) as checkpoints:
        for step in (3, 5):
            checkpoints.save(step, state, cursor=step, fingerprint={})
    (run / "train_log.jsonl").write_text('{"step": 5}\n')
    prepared(recipe, run / "data" / "train")
    prepared(recipe, run / "data" / "heldout", f"data.train={root / 'heldout.jsonl'}")
    spoil_data(recipe, root)
    spoil_targets(root)
    drafter = tiny_models.save_drafter(root / "drafter", tiny_models.random_drafter(21, **SIZES), taps=(1, 4))
    (shutil.copytree(drafter, root / "weightless") / "model.safetensors").unlink()
    return root


def prepared(recipe: tiny_runs.TinyRecipe, folder: pathlib.Path, *changes: str) -> None:
    whole, _ = train.read_arguments(recipe.arguments("unused", *changes))
    open_records(Experiment.open(whole), whole.data.train, folder)


def spoil_data(recipe: tiny_runs.TinyRecipe, root: pathlib.Path) -> None:
    (root / "empty.jsonl").write_text("")
    (root / "unanswered.jsonl").write_text(json.dumps({"messages": [ASKED]}) + "\n")
    (root / "rows.txt").write_text("hi\n")
    (root / "folder").mkdir()
    other = shutil.copytree(root / "llama", root / "other")
    file = other / "chat_template.jinja"
    file.write_text(file.read_text().replace("{{ m.content }}", "{{ m.content | trim }}"))
    prepared(recipe, root / "others-records", f"target.path={other}")
    for name in ("lengths.npy", "manifest.json"):
        folder = shutil.copytree(root / "others-records", root / f"without-{name}")
        (folder / name).unlink()


def spoil_targets(root: pathlib.Path) -> None:
    (root / "text.gguf").write_text("hello")
    (shutil.copytree(root / "llama", root / "no-template") / "chat_template.jinja").unlink()
    (shutil.copytree(root / "llama", root / "no-tokenizer") / "tokenizer.json").unlink()
    for name, config in {
        "gpt2": {"model_type": "gpt2"},
        "nothing": {},
        "list": [],
        "no-sizes": {"model_type": "llama"},
    }.items():
        (shutil.copytree(root / "llama", root / name) / "config.json").write_text(json.dumps(config))


@pytest.fixture
def refusal(recipe, root, tmp_path, capsys, monkeypatch):
    """What the command says of arguments that it refuses."""

    def work(*_: object, **__: object) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr(TargetFiles, "load", work)
    monkeypatch.setattr(TargetFiles, "load_some", work)

    def run(arguments: str, *more: str) -> str:
        given = [
            part.replace("{root}", str(root)).replace("{new}", str(tmp_path)) for part in shlex.split(arguments)
        ]
        given += more
        named = {argument.partition("=")[0] for argument in given}
        rest = {"recipe": recipe.file, "out": root / "run"}
        given += [f"{key}={value}" for key, value in rest.items() if key not in named]
        before = contents(root / "run")
        monkeypatch.setattr("sys.argv", ["train", *given])
        capsys.readouterr()
        with pytest.raises(SystemExit) as status:
            run_entry_point(train.main, usage=train.USAGE, schema=Recipe)
        assert status.value.code == 2
        assert contents(root / "run") == before
        return one_line(capsys.readouterr().err)

    return run


def contents(folder: pathlib.Path) -> dict[pathlib.Path, tuple[int, int]]:
    stats = {file: file.stat() for file in folder.rglob("*")}
    return {file: (stat.st_size, stat.st_mtime_ns) for file, stat in stats.items()}


def one_line(err: str) -> str:
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    return err.removeprefix("error: ").rstrip("\n")


ARGUMENTS = [*FORM, *LIMITS, *TOGETHER, *DATA]


@pytest.mark.parametrize(("arguments", "named"), ARGUMENTS, ids=[row[0] for row in ARGUMENTS])
def test_bad_arguments_are_refused(refusal, arguments, named):
    assert re.search(named, refusal(arguments))


FILES = [
    ("- 1\n- 2\n", "expected a mapping of keys, found list"),
    ("hello\n", r"unknown key 'hello'"),
    ("mesh=one\n", r"unknown key 'mesh=one' \(did you mean 'mesh'\?\)"),
    ("", r"^data\.train: a value is required, and there is none in .*bad\.yaml and command line"),
    ("mesh: one\nmesh: two\n", r"not valid YAML \(line 2: found duplicate key.* mesh"),
    ("optim:\n  lr: 1\n  lr: 2\n", r"not valid YAML \(line 3: found duplicate key.* lr"),
    ("optim:\n\tlr: 1\n", r"not valid YAML \(line 2: found character that cannot start any token"),
    ("optim: {lr: 1\n", r"not valid YAML \(line 2: "),
    ("mesh: one\n---\nmesh: two\n", r"not valid YAML \(line 2: "),
    ("out: caf\xe9\n", r"not valid YAML \(.*codec can't decode byte 0xe9"),
    ("optim:\nmesh: one\n", r"optim is a group of keys, found null; write optim\.KEY=value"),
    ("1: 2\n", r"unknown key '1'"),
    ("drafter:\n  block_sise: 8\n", r"unknown key 'drafter\.block_sise' \(did you mean 'drafter\.block_size'\?\)"),
    ("recipe: quickstart\n", r"unknown key 'recipe'"),
    ("mesh: ${out}\n", r"mesh: references such as '\$\{out\}' are not supported; write the value"),
    ("optim: {lr: [1]}\n", r"optim\.lr: found \[1\], allowed: a number, at least 0\.0"),
]


@pytest.mark.parametrize(("text", "named"), FILES)
def test_a_bad_recipe_file_is_refused_by_its_name(refusal, tmp_path, text, named):
    file = tmp_path / "bad.yaml"
    file.write_bytes(text.encode("latin-1"))
    said = refusal("recipe={new}/bad.yaml")
    assert re.search(named, said)
    assert "bad.yaml" in said


LAYOUT = {
    "device_count": 8,
    "target": {"devices": [0, 1, 2, 3, 4, 5], "axes": {"data": 6}},
    "drafter": {"devices": [6, 7], "axes": {"data": 1, "model": 2}},
}
MESHES = [
    # place of a change, the value there, what the message must name
    ("device_count", 9, r"device_count is 9 but jax finds 8 cpu devices; choose another mesh="),
    ("device_count", 0, r"device_count: found 0, allowed: at least 1"),
    ("device_count", "many", r"device_count: found 'many', allowed: a whole number, at least 1"),
    ("device_count", 6, r"drafter\.devices names device 6, allowed: 0 to 5"),
    ("devcie_count", 8, r"unknown key 'devcie_count' \(did you mean 'device_count'\?\)"),
    ("platform", "gpu", r"platform: found 'gpu' .*; allowed: cpu"),
    ("target", None, r"target is a group of keys, found null"),
    ("target.device", [1], r"unknown key 'target\.device' \(did you mean 'target\.devices'\?\)"),
    ("target.devices", [0, 1, 2, 3, 4, 4], r"target\.devices names a device twice: \[0, 1, 2, 3, 4, 4\]"),
    ("target.devices", [-1, 1, 2, 3, 4, 5], r"target\.devices names device -1, allowed: 0 to 7"),
    ("target.devices", [0, 1], r"target\.axes \{'data': 6\} do not multiply to its 2 devices"),
    ("target.devices", [], r"target\.axes \{'data': 6\} do not multiply to its 0 devices"),
    ("target.devices", 6, r"target\.devices: found 6, allowed: a list of whole numbers"),
    ("target.devices", None, r"target\.devices: found null, allowed: a list of whole numbers"),
    ("drafter.devices", ["a", 7], r"drafter\.devices\[0\]: found 'a', allowed: a whole number"),
    ("drafter.axes", {"model": 2}, r"drafter\.axes needs an axis `data` .*, found \{'model': 2\}"),
    ("drafter.axes", {"data": -1, "model": -2}, r"drafter\.axes .* do not multiply to its 2 devices"),
    ("drafter.axes.data", "one", r"drafter\.axes\.data: found 'one', allowed: a whole number"),
    ("drafter.axes", [1, 2], r"drafter\.axes: found \[1, 2\], allowed: a mapping of names to whole numbers"),
    ("drafter.rules", {"mpl": "model"}, r"drafter\.rules: unknown weight axis 'mpl'; known: embed, mlp, heads"),
    ("drafter.rules", {"mlp": "tensor"}, r"drafter\.rules\.mlp: no mesh axis 'tensor'; the mesh has data, model"),
    ("drafter.rules", {"mlp": None}, r"drafter\.rules\.mlp: found null, allowed: text"),
    ("drafter.rules", {"mlp": {"a": 1}}, r"drafter\.rules\.mlp: found \{'a': 1\}, allowed: a single value"),
]


@pytest.mark.parametrize(("place", "value", "named"), MESHES, ids=[f"{row[0]}={row[1]}" for row in MESHES])
def test_a_bad_mesh_file_is_refused_by_its_name(refusal, tmp_path, place, value, named):
    layout = copy.deepcopy(LAYOUT)
    *groups, key = place.split(".")
    part = layout
    for group in groups:
        part = part[group]
    part[key] = value
    (tmp_path / "bad.yaml").write_text(json.dumps(layout))
    said = refusal("mesh={new}/bad.yaml")
    assert re.search(named, said)
    assert "bad.yaml" in said


def test_rules_that_do_not_fit_the_weights_are_refused_before_any_are_read(refusal, tmp_path):
    layout = copy.deepcopy(LAYOUT)
    layout["drafter"] |= {"rules": {"mlp": "model", "embed": "model"}}
    (tmp_path / "twice.yaml").write_text(json.dumps(layout))
    said = refusal("mesh={new}/twice.yaml")
    assert re.search(r"mesh rules: axes \('embed', 'mlp'\) of \S+ use a mesh axis twice", said)


def test_the_command_itself_says_it_in_one_line(recipe, root):
    arguments = recipe.arguments("run", "drafter.taps=[1,5]", "mesh=one")
    done = subprocess.run(
        [sys.executable, "-m", "dflash_jax.train", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert re.search(r"^drafter\.taps: found \[1, 5\]; allowed", one_line(done.stderr))
