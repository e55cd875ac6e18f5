"""Exported folders: what is written, that conversions lose nothing, what is refused, and what a fault leaves."""

import errno
import json
import pathlib
import shutil

import ml_dtypes
import numpy as np
import pytest
from failing import after
from safetensors.numpy import load_file
from tiny_exports import KINDS, converted, exported, finished
from tiny_models import random_drafter

from dflash_jax import export, train
from dflash_jax.errors import UserError
from dflash_jax.published.drafter_folder import DrafterFolder
from dflash_jax.published.finished_drafter import FinishedDrafter

DRAFTED = range(3, 60, 4)


@pytest.fixture
def unchecked(monkeypatch):
    """Without the checks after writing, which other tests are about."""
    monkeypatch.setattr(export, "check_folder", lambda *_, **__: None)


def drafter(target, kind: str = "full", **changes) -> FinishedDrafter:
    draft_tokens = changes.pop("draft_tokens", None)
    return finished(random_drafter(3, **KINDS[kind], **changes), target.path, draft_tokens=draft_tokens)


def fields(folder: pathlib.Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def same_bytes(*folders: pathlib.Path) -> bool:
    files = ("config.json", "model.safetensors")
    return all(
        (folder / file).read_bytes() == (folders[0] / file).read_bytes() for folder in folders for file in files
    )


# What is written.


def test_every_key_that_an_engine_reads_is_there(plain_llama, tmp_path):
    rope = {"rope_theta": 500.0, "rope_type": "default"}
    everywhere = {"block_size": 5, "mask_token_id": 6, "target_layer_ids": [0, 1]}
    found = fields(exported(drafter(plain_llama, "sliding"), tmp_path / "a"))
    assert found == {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **everywhere,
        "dflash_config": everywhere,
        "num_target_layers": 3,
        "hidden_size": 36,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "vocab_size": 66,
        "max_position_embeddings": 128,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "rope_theta": 500.0,
        "rope_scaling": None,
        "rope_parameters": rope,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 9,
        "use_sliding_window": True,
        "max_window_layers": 2,
    }


@pytest.mark.parametrize(
    ("kind", "causal"),
    [
        ("full", None),
        ("full, causal", True),
        ("sliding", None),
        ("sliding, both ways", False),
        ("sliding, all", None),
    ],
)
def test_causality_is_said_for_all_layers_or_not_at_all(plain_llama, tmp_path, unchecked, kind, causal):
    found = fields(exported(drafter(plain_llama, kind), tmp_path / "a"))
    assert (found.get("is_causal"), found["dflash_config"].get("causal")) == (causal, causal)


def test_yarn_is_in_both_spellings(plain_llama, tmp_path):
    found = fields(exported(drafter(plain_llama, "YaRN"), tmp_path / "a"))
    yarn = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "attention_factor": 1.3,
        "beta_fast": 4.0,
        "beta_slow": 1.0,
        "truncate": True,
    }
    assert found["rope_scaling"] == yarn
    assert found["rope_parameters"] == {**yarn, "rope_theta": 500.0}


def test_a_head_is_tied_as_the_targets(tied_llama, tmp_path, unchecked):
    assert fields(exported(drafter(tied_llama), tmp_path / "a"))["tie_word_embeddings"] is True
    assert fields(exported(drafter(tied_llama, width=24), tmp_path / "b"))["tie_word_embeddings"] is False


@pytest.mark.parametrize(("dtype", "rounded"), [("bfloat16", ml_dtypes.bfloat16), ("float32", np.float32)])
def test_weights_are_the_drafters_and_nothing_else(plain_llama, tmp_path, unchecked, dtype, rounded):
    made = drafter(plain_llama)
    found = load_file(exported(made, tmp_path / "a", dtype=dtype) / "model.safetensors")
    assert found.keys() == made.params.keys()
    assert len(found) == 3 + 11 * 2
    for name, array in found.items():
        assert array.dtype == rounded
        np.testing.assert_array_equal(array, made.params[name].read(()).astype(rounded))


def test_projections_are_multiplied_into_an_embedding_and_a_head(plain_llama, tmp_path):
    made = drafter(plain_llama, width=24)
    folder = exported(made, tmp_path / "a", dtype="float32")
    found = load_file(folder / "model.safetensors")
    assert found.keys() == made.params.keys() - {"embed_proj.weight", "head_proj.weight"} | {
        "embed_tokens.weight",
        "lm_head.weight",
    }
    weights = {
        name: tensor.detach().double().numpy() for name, tensor in plain_llama.torch_model.named_parameters()
    }
    down, up = (made.params[f"{name}_proj.weight"].read(()).astype(np.float64) for name in ("embed", "head"))
    np.testing.assert_allclose(
        found["embed_tokens.weight"], weights["model.embed_tokens.weight"] @ down.T, atol=1e-5
    )
    np.testing.assert_allclose(found["lm_head.weight"], weights["lm_head.weight"] @ up, atol=1e-5)
    assert fields(folder)["target_hidden_size"] == fields(folder)["dflash_config"]["target_hidden_size"] == 36
    opened = DrafterFolder.open(folder)
    assert (opened.config.width, opened.config.target_width, opened.config.feature_width) == (24, 24, 72)
    np.testing.assert_array_equal(opened.own_head().read(()), found["lm_head.weight"])
    np.testing.assert_array_equal(opened.own_embedding().read(()), found["embed_tokens.weight"])


def test_a_draft_vocabulary_is_kept_by_speculators_and_explained_by_z_labs(plain_llama, tmp_path):
    made = drafter(plain_llama, draft_tokens=DRAFTED)
    folder = exported(made, tmp_path / "s", format="speculators", dtype="float32")
    found = load_file(folder / "model.safetensors")
    assert fields(folder)["draft_vocab_size"] == len(DRAFTED) == 15
    assert (found["d2t"] + np.arange(15)).tolist() == np.flatnonzero(found["t2d"]).tolist() == list(DRAFTED)
    head = plain_llama.torch_model.lm_head.weight.detach().numpy()
    np.testing.assert_array_equal(found["lm_head.weight"], head[list(DRAFTED)])
    assert DrafterFolder.open(folder).draft_tokens().tolist() == list(DRAFTED)

    folder = exported(made, tmp_path / "z", format="zlab")
    assert not {"d2t", "t2d", "lm_head.weight"} & load_file(folder / "model.safetensors").keys()
    assert "draft vocabulary of 15 tokens, which this format cannot say" in (folder / "README.md").read_text()


# Conversions.


@pytest.mark.parametrize("kind", ["full", "sliding", "sliding, both ways", "YaRN"])
@pytest.mark.parametrize("width", [36, 24])
def test_conversions_there_and_back_are_byte_equal(plain_llama, tmp_path, unchecked, kind, width):
    made, target = drafter(plain_llama, kind, width=width), plain_llama.path
    zlab, speculators = (exported(made, tmp_path / name, format=name) for name in ("zlab", "speculators"))
    for format, first, other in (("zlab", zlab, speculators), ("speculators", speculators, zlab)):
        again = converted(first, target, tmp_path / f"{format}-again", format=format)
        across = converted(other, target, tmp_path / f"{format}-across", format=format)
        assert same_bytes(first, again, across)


@pytest.mark.parametrize("width", [36, 24])
def test_a_draft_vocabulary_survives_conversion(plain_llama, tmp_path, unchecked, width):
    made = drafter(plain_llama, width=width, draft_tokens=DRAFTED)
    first = exported(made, tmp_path / "first", format="speculators")
    assert same_bytes(first, converted(first, plain_llama.path, tmp_path / "again", format="speculators"))
    if width == 36:
        zlab = exported(made, tmp_path / "zlab")
        assert same_bytes(zlab, converted(first, plain_llama.path, tmp_path / "across"))
    else:
        with pytest.raises(UserError, match=r"format: the drafter's own head covers 15 of 66 tokens"):
            converted(first, plain_llama.path, tmp_path / "across")


def test_what_speculators_format_cannot_say_is_refused(plain_llama, tmp_path):
    with pytest.raises(UserError, match="format: full layers that are causal cannot be said"):
        exported(drafter(plain_llama, "full, causal"), tmp_path / "a", format="speculators")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["run=r", "drafter=d"], "run: give either"),
        ([], "run: give either"),
        (["run=nowhere"], "run: nowhere is not a run directory"),
        (["drafter={made}"], "target: a value is required"),
        (["drafter={made}", "target={tied}"], r"drafter: .*made is not for llama: vocab_size is 67"),
    ],
)
def test_arguments_that_name_no_drafter(plain_llama, tied_llama, tmp_path, unchecked, arguments, named):
    made = exported(drafter(plain_llama), tmp_path / "made")
    (made / "config.json").write_text(json.dumps(fields(made) | {"vocab_size": 67}))
    given = [argument.format(made=made, tied=tied_llama.path) for argument in arguments]
    with pytest.raises(UserError, match=named):
        export.main([*given, f"to={tmp_path / 'to'}"])
    assert not (tmp_path / "to").exists()


# What is never written over, and what a fault leaves.


def test_an_earlier_export_is_replaced(plain_llama, tmp_path, unchecked):
    to = exported(drafter(plain_llama), tmp_path / "to", dtype="float32")
    exported(drafter(plain_llama), to, dtype="bfloat16")
    assert fields(to)["dtype"] == "bfloat16"
    assert [item.name for item in tmp_path.iterdir()] == ["to"]


def test_anything_else_is_not_written_over(plain_llama, tmp_path, unchecked):
    to, made = tmp_path / "to", drafter(plain_llama)
    to.write_text("mine")
    with pytest.raises(UserError, match=r"to: .*/to is a file"):
        exported(made, to)
    to.unlink()
    to.mkdir()
    exported(made, to)  # an empty folder is free
    (to / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"to: .*/to holds more than an export: notes\.txt"):
        exported(made, to)
    (to / "notes.txt").unlink()
    mark = json.loads((to / "export.json").read_text())
    (to / "export.json").write_text(json.dumps(mark | {"drafter": "two"}))
    with pytest.raises(UserError, match=r"to: .*/to is an export of another drafter \(two\)"):
        exported(made, to)
    (to / "export.json").unlink()
    with pytest.raises(
        UserError, match=r"to: .*/to was not exported here, and holds README\.md, config\.json, model"
    ):
        exported(made, to)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"to: .*/link is a link"):
        exported(made, tmp_path / "link")


FULL_DISK = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(("fault", "raised"), [(FULL_DISK, UserError), (KeyboardInterrupt(), KeyboardInterrupt)])
@pytest.mark.parametrize("calls", [0, 5])
@pytest.mark.parametrize("earlier", [False, True])
def test_a_fault_leaves_nothing_half_written(
    plain_llama, tmp_path, unchecked, monkeypatch, fault, raised, calls, earlier
):
    made, to = drafter(plain_llama), tmp_path / "to"
    if earlier:
        exported(made, to, dtype="float32")
    monkeypatch.setattr(export, "write_tensors", faulty_writing(calls, fault))
    with pytest.raises(raised) as caught:
        exported(made, to)
    if raised is UserError:
        assert "cannot be written (No space left on device); nothing was kept" in str(caught.value)
    assert [item.name for item in tmp_path.iterdir()] == (["to"] if earlier else [])
    assert not earlier or fields(to)["dtype"] == "float32"


def faulty_writing(calls: int, fault: BaseException):
    from dflash_jax.published import tensor_file

    def write(file, tensors):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tensor_file, "pieces", after(calls, tensor_file.pieces, fault))
            tensor_file.write_tensors(file, tensors)

    return write


def test_what_a_killed_export_left_is_swept_away(plain_llama, tmp_path, unchecked):
    made, to = drafter(plain_llama), tmp_path / "to"
    exported(made, to)
    shutil.copytree(to, tmp_path / ".to.unfinished")
    (tmp_path / ".to.unfinished" / "model.safetensors").write_bytes(b"half")
    to.rename(tmp_path / ".to.previous")  # killed between its two renamings
    exported(made, to)
    assert [item.name for item in tmp_path.iterdir()] == ["to"]
    assert len(load_file(to / "model.safetensors")) == len(made.params)


# A run.


def test_a_run_is_exported_with_its_history(recipe, tmp_path, capsys):
    run = recipe.root / "run"
    more = ["train.steps=2", "eval.every=0", "drafter.vocab=40", "drafter.mask_token=260", "drafter.width=24"]
    assert train.main(recipe.arguments("run", *more, "checkpoint.every=1")) == 0
    report = {
        "drafters": [{"name": "run", "step": 1}, {"name": "other", "step": 1}],
        "sets": [
            {
                "set": "set-0",
                "ways": [
                    {"drafter": None, "decoding": "plain", "accept_len": None},
                    {"drafter": "run", "decoding": "chain", "accept_len": 1.234},
                    {"drafter": "other", "decoding": "chain", "accept_len": 9.9},
                ],
            }
        ],
    }
    (run / "report").mkdir()
    (run / "report" / "evaluation.json").write_text(json.dumps(report))
    for step, format in (("1", "speculators"), ("latest", "zlab")):
        assert export.main([f"run={run}", f"step={step}", f"to={tmp_path / step}", f"format={format}"]) == 0
    assert f"written: {tmp_path / 'latest'} (" in capsys.readouterr().out
    card, older = ((tmp_path / name / "README.md").read_text() for name in ("latest", "1"))
    digest = json.loads((run / "data" / "train" / "manifest.json").read_text())["digest"]
    for text in (
        "# DFlash drafter for llama",
        "| MASK | token 260 |",
        f"vllm serve {recipe.root}/llama --speculative-config '{{",
        f'"method": "dflash", "model": "{tmp_path}/latest", "num_speculative_tokens": 3}}',
        "--speculative-num-draft-tokens 4",
        f"python tools/serve_check.py run={run}\n",
        "trained with dflash_jax, step 2",
        f"sha256 `{digest}`",
        "  block_size: 4",
        "width, 24, is not the target's, 36",
        "draft vocabulary of 40 tokens",
    ):
        assert text in card
    assert "## Measured" not in card  # the evaluation is of another step
    assert "| set-0 | chain | 1.23 |" in older
    assert "9.9" not in older
    assert f"python tools/serve_check.py run={run} step=1\n" in older
    assert DrafterFolder.open(tmp_path / "1").draft_tokens().shape == (40,)
    with pytest.raises(UserError, match=r"step: found 'best', but no step in .* was evaluated"):
        export.main([f"run={run}", "step=best", f"to={tmp_path / 'best'}"])
