"""The Llama target against transformers: taps, logits, packing, cached steps, and strict loading."""

import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from tiny_models import load_llama, save_llama

from dflash_jax.errors import UserError
from dflash_jax.models.cache import KVCache
from dflash_jax.models.targets import TargetFiles

TAPS = (0, 1)
LENGTHS = (17, 11)


@functools.partial(jax.jit, static_argnames="taps")
def hidden(target, tokens, positions, segments, taps=TAPS):
    return target.hidden(tokens, positions, segment_ids=segments, taps=taps)


@jax.jit
def step(target, tokens, cache):
    return target.step(tokens, cache, taps=TAPS)


@pytest.fixture(scope="module", params=["plain_llama", "tied_llama"])
def hub(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def target(hub):
    return load_llama(hub.path)


def reference(torch_model, tokens):
    """Hidden states [L + 1, S, E] and logits [S, V] of one row of tokens without padding."""
    with torch.no_grad():
        out = torch_model(torch.tensor(np.asarray(tokens)[None]), output_hidden_states=True)
    return np.stack([states[0].numpy() for states in out.hidden_states]), out.logits[0].numpy()


def random_rows():
    return [np.random.default_rng(row).integers(0, 66, length) for row, length in enumerate(LENGTHS)]


def close(actual, expected, atol=2e-5):
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=1e-5, atol=atol)


def expected_features(states):
    return np.concatenate([states[tap + 1] for tap in TAPS], axis=-1)


def test_rows_with_right_padding_equal_transformers(hub, target):
    rows = random_rows()
    tokens, segments = np.full((2, 20), 5, np.int32), np.zeros((2, 20), np.int32)
    for row, text in enumerate(rows):
        tokens[row, : len(text)], segments[row, : len(text)] = text, 1
    positions = np.broadcast_to(np.arange(20), (2, 20))
    features, last = hidden(target, jnp.asarray(tokens), positions, jnp.asarray(segments))
    assert features.shape == (2, 20, 2 * 36)
    logits = target.logits(last)
    assert logits.dtype == jnp.float32
    for row, text in enumerate(rows):
        states, expected = reference(hub.torch_model, text)
        close(features[row, : len(text)], expected_features(states))
        close(last[row, : len(text)], states[-1])
        close(logits[row, : len(text)], expected, atol=1e-4)


def test_features_keep_the_order_of_the_taps(plain_llama):
    target = load_llama(plain_llama.path)
    tokens = jnp.asarray(random_rows()[0])[None]
    positions, segments = jnp.arange(17)[None], jnp.ones((1, 17), jnp.int32)
    first, _ = hidden(target, tokens, positions, segments, taps=(0, 1))
    second, _ = hidden(target, tokens, positions, segments, taps=(1, 0))
    np.testing.assert_array_equal(first[..., :36], second[..., 36:])
    np.testing.assert_array_equal(first[..., 36:], second[..., :36])


def test_packed_documents_equal_documents_apart(hub, target):
    rows = random_rows()
    tokens = jnp.asarray(np.concatenate(rows))[None]
    positions = jnp.asarray(np.concatenate([np.arange(length) for length in LENGTHS]))[None]
    segments = jnp.asarray(np.repeat([1, 2], LENGTHS))[None]
    features, last = hidden(target, tokens, positions, segments)
    starts = (0, LENGTHS[0])
    for text, start in zip(rows, starts, strict=True):
        states, _ = reference(hub.torch_model, text)
        close(features[0, start : start + len(text)], expected_features(states))
        close(last[0, start : start + len(text)], states[-1])


def empty_cache(target, *, rows, capacity):
    config = target.config
    shape = (rows, capacity, config.kv_heads, config.head_width)
    return KVCache.empty(config.layers, shape=shape, dtype=jnp.dtype("float32"))


def test_steps_in_uneven_pieces_equal_the_whole_row(hub, target):
    rows = [np.random.default_rng(7).integers(0, 66, 14), np.random.default_rng(8).integers(0, 66, 10)]
    expected = [reference(hub.torch_model, text)[0] for text in rows]
    # How many of each piece's tokens count, by row; what does not count is fed again with the next piece.
    pieces = [(7, (6, 3)), (4, (4, 4)), (4, (1, 0)), (4, (3, 3))]
    cache, seen = empty_cache(target, rows=2, capacity=20), [0, 0]
    for width, counts in pieces:
        fed = np.zeros((2, width), np.int32)
        for row, text in enumerate(rows):
            piece = text[seen[row] : seen[row] + width]
            fed[row, : len(piece)] = piece
        features, last, cache = step(target, jnp.asarray(fed), cache)
        cache = cache.advance(jnp.asarray(counts))
        for row, count in enumerate(counts):
            states = expected[row][:, seen[row] : seen[row] + count]
            close(features[row, :count], expected_features(states))
            close(last[row, :count], states[-1])
            seen[row] += count
    assert seen == [14, 10]
    np.testing.assert_array_equal(cache.lengths, seen)


def test_rejected_tokens_leave_no_trace(target):
    random = np.random.default_rng(3)
    prompt, rejected, kept, after = (
        jnp.asarray(random.integers(0, 66, (2, width)), jnp.int32) for width in (7, 7, 4, 4)
    )
    lengths = jnp.array([6, 4])

    def run(*, with_rejected):
        cache = step(target, prompt, empty_cache(target, rows=2, capacity=20))[2].advance(lengths)
        if with_rejected:
            cache = step(target, rejected, cache)[2]
        first, first_last, cache = step(target, kept, cache)
        second, second_last, _ = step(target, after, cache.advance(jnp.array([3, 1])))
        return first, first_last, second, second_last

    for clean, written_over in zip(run(with_rejected=False), run(with_rejected=True), strict=True):
        np.testing.assert_array_equal(clean, written_over)


@pytest.fixture
def folder(plain_llama, tmp_path):
    """A copy of a model folder that a test may spoil."""
    return shutil.copytree(plain_llama.path, tmp_path / "copy")


def change_config(folder, **changes):
    file = folder / "config.json"
    fields = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in fields.items() if value != "absent"}))


def test_every_tensor_that_does_not_fit_is_named_at_once(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"], tensors["model.layers.2.mlp.up_proj.weight"]
    tensors["model.layers.3.input_layernorm.weight"] = np.ones(36, np.float32)
    tensors["model.layers.0.self_attn.k_proj.weight"] = np.ones((36, 20), np.float32)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError) as error:
        load_llama(folder)
    message = str(error.value)
    for part in (
        str(folder),
        "4 tensors",
        "missing model.norm.weight",
        "missing model.layers.2.mlp.up_proj.weight",
        "unexpected model.layers.3.input_layernorm.weight [36]",
        "model.layers.0.self_attn.k_proj.weight has shape [36, 20], expected [20, 36]",
    ):
        assert part in message


def test_a_long_list_of_faults_is_cut_and_counted(folder):
    save_file({"nothing": np.ones(1, np.float32)}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"31 tensors do not fit .*and 23 more"):
        load_llama(folder)


def test_a_tied_checkpoint_may_repeat_the_head(tied_llama, tmp_path):
    folder = shutil.copytree(tied_llama.path, tmp_path / "copy")
    tensors = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in tensors
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}, folder / "model.safetensors")
    target = load_llama(folder)
    assert target.head is target.embedding


def test_an_untied_checkpoint_needs_its_head(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"missing lm_head\.weight"):
        load_llama(folder)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "mamba"}, r"model_type 'mamba'.*supported: llama"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 731.0, "factor": 4.0}}, "rope_type 'yarn'"),
        (
            {"rope_parameters": "absent", "rope_theta": 731.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_type 'linear'",
        ),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rms_norm_eps": "absent"}, "lacks 'rms_norm_eps'"),
        ({"rope_parameters": "absent"}, "lacks 'rope_theta'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(folder, changes, named):
    change_config(folder, **changes)
    with pytest.raises(UserError, match=named):
        load_llama(folder)


def test_both_spellings_of_the_rope_fields_mean_the_same(folder):
    new = TargetFiles.open(folder).config
    change_config(folder, rope_parameters="absent", rope_theta=731.0, rope_scaling=None)
    assert TargetFiles.open(folder).config == new
    assert new.rope_theta == 731.0


def test_the_head_width_may_be_left_out(tied_llama, tmp_path):
    folder = shutil.copytree(tied_llama.path, tmp_path / "copy")
    change_config(folder, head_dim="absent")
    assert TargetFiles.open(folder).config == TargetFiles.open(tied_llama.path).config


def test_weights_in_several_files_load_as_one(tmp_path):
    whole = save_llama(tmp_path / "whole", seed=4)
    split = save_llama(tmp_path / "split", seed=4, max_shard_size="20KB")
    files = sorted(split.path.glob("*.safetensors"))
    assert len(files) > 2
    tokens = jnp.asarray(random_rows()[0])[None]
    where = (jnp.arange(17)[None], jnp.ones((1, 17), jnp.int32))
    for one, other in zip(
        hidden(load_llama(whole.path), tokens, *where),
        hidden(load_llama(split.path), tokens, *where),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)
    files[1].unlink()
    with pytest.raises(UserError, match=f"weight file {files[1].name} is missing"):
        load_llama(split.path)


def test_bfloat16_weights_are_widened_exactly(plain_llama, folder):
    tensors = load_file(folder / "model.safetensors")
    narrow = {name: array.astype(jnp.bfloat16) for name, array in tensors.items()}
    save_file(narrow, folder / "model.safetensors")
    loaded = load_llama(folder).model.layers[2].mlp.down_proj.weight[...]
    expected = plain_llama.torch_model.model.layers[2].mlp.down_proj.weight.detach().to(torch.bfloat16).float()
    assert loaded.dtype == jnp.float32
    np.testing.assert_array_equal(loaded, expected.numpy())


def test_a_path_that_holds_no_model_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"neither a model folder nor a \.gguf file"):
        TargetFiles.open(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"no config\.json"):
        TargetFiles.open(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "lla')
    with pytest.raises(UserError, match="not valid JSON"):
        TargetFiles.open(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(UserError, match="damaged or not a safetensors file"):
        list(TargetFiles.open(tmp_path).tensors())
