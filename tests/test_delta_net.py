"""The gated delta-net layer against transformers: whole rows, packed documents, cached steps, what they keep."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from dflash_jax.models.delta_net import DeltaMemory, DeltaNetConfig, GatedDeltaNet

SIZES = DeltaNetConfig(width=40, key_heads=2, value_heads=6, key_width=16, value_width=12, kernel=4, norm_eps=1e-4)
ROWS, LENGTH = 2, 150
TREE = np.array(  # a chain, branches at its start, middle and end, and a second root
    [[-1, 0, 1, 0, 2, 4, 5, 3, 6, 6, -1, 10], [-1, -1, 1, 2, 2, 4, 3, 5, 7, 8, 9, 0]]
)
PATHS = np.array([[0, 1, 2, 4, 5, 6, 9], [1, 2, 4, 5, 7, 8, 9]])

whole = jax.jit(lambda layer, x, segments: layer(x, segment_ids=segments))
step = jax.jit(lambda layer, x, memory, parents=None: layer.step(x, memory, parents=parents))
keep = jax.jit(lambda extension, count, path=None: extension.keep(count, path=path))


@pytest.fixture(scope="module")
def torch_layer():
    c = SIZES
    fields = {
        "hidden_size": c.width,
        "num_hidden_layers": 1,
        "layer_types": ["linear_attention"],
        "linear_num_key_heads": c.key_heads,
        "linear_num_value_heads": c.value_heads,
        "linear_key_head_dim": c.key_width,
        "linear_value_head_dim": c.value_width,
        "linear_conv_kernel_dim": c.kernel,
        "rms_norm_eps": c.norm_eps,
        "hidden_act": "silu",
    }
    layer = Qwen3_5GatedDeltaNet(Qwen3_5TextConfig(**fields), 0).eval()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=draw)
        layer.A_log -= 3.0  # or every state would be forgotten at once
    return layer


def build(torch_layer, dtype=jnp.float32):
    """The layer with torch's parameters, which must have the same names and shapes."""
    layer = GatedDeltaNet(SIZES, nnx.Rngs(0))
    graph, state = nnx.split(layer)
    flat = {".".join(map(str, path)): (path, leaf) for path, leaf in nnx.to_flat_state(state)}
    tensors = {name: tensor.detach().numpy() for name, tensor in torch_layer.named_parameters()}
    assert {name: leaf.shape for name, (_, leaf) in flat.items()} == {n: t.shape for n, t in tensors.items()}

    def value(name, leaf):
        return jnp.asarray(tensors[name], jnp.float32 if leaf.get_metadata().get("keep_dtype") else dtype)

    filled = [(path, leaf.replace(value(name, leaf))) for name, (path, leaf) in flat.items()]
    return nnx.merge(graph, nnx.from_flat_state(filled))


@pytest.fixture(scope="module")
def layer(torch_layer):
    return build(torch_layer)


@pytest.fixture(scope="module")
def x():
    return np.random.default_rng(1).normal(size=(ROWS, LENGTH, SIZES.width)).astype(np.float32)


def reference(torch_layer, x):
    """Outputs [B, S, E] of x [B, S, E] without a cache."""
    with torch.no_grad():
        return torch_layer(torch.tensor(np.asarray(x))).numpy()


def close(actual, expected, atol=1e-5):
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=1e-5, atol=atol)


def same_bits(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def empty(rows=ROWS, dtype=jnp.float32):
    return DeltaMemory.empty(SIZES, rows, dtype)


def advance(layer, tokens, memory):
    """The memory after all of the tokens [B, S, E]."""
    _, extension = step(layer, tokens, memory)
    return keep(extension, np.full(*tokens.shape[:2]))


@pytest.fixture(scope="module")
def memory(layer, x):
    """After 20 tokens of each row."""
    memory = empty()
    for start in range(0, 20, 5):
        memory = advance(layer, x[:, start : start + 5], memory)
    return memory


@pytest.mark.parametrize("length", [1, 2, LENGTH])
def test_whole_rows(layer, torch_layer, x, length):
    x = x[:, :length]
    close(whole(layer, x, np.zeros((ROWS, length), np.int32)), reference(torch_layer, x))


def test_packed_documents_are_documents_apart(layer, torch_layer, x):
    lengths = ((70, 1, 2, 77), (3, 64, 83))
    segments = np.stack([np.repeat(np.arange(len(row)), row) for row in lengths]).astype(np.int32)
    y = whole(layer, x, segments)
    for row, documents in enumerate(lengths):
        start = 0
        for document in documents:
            own = np.s_[row : row + 1, start : start + document]
            close(y[own], reference(torch_layer, x[own]))
            start += document


@pytest.mark.parametrize("lengths", [(70, 5, 1, 1, 70), (5, 5, 70, 5), (1,) * 9, (64, 70)])
def test_cached_steps_are_the_whole_row(layer, torch_layer, x, lengths):
    expected, memory, start = reference(torch_layer, x), empty(), 0
    for length in lengths:
        tokens = x[:, start : start + length]
        y, _ = step(layer, tokens, memory)
        close(y, expected[:, start : start + length])
        memory = advance(layer, tokens, memory)
        start += length


@pytest.mark.parametrize(("length", "counts"), [(5, (2, 4)), (5, (0, 5)), (70, (1, 66)), (70, (70, 0))])
def test_rows_keep_their_own_number_of_tokens(layer, torch_layer, x, memory, length, counts):
    _, extension = step(layer, x[:, 20 : 20 + length], memory)
    after = keep(extension, np.array(counts))
    y, _ = step(layer, np.stack([x[row, 20 + count : 25 + count] for row, count in enumerate(counts)]), after)
    expected = reference(torch_layer, x)
    for row, count in enumerate(counts):
        close(y[row], expected[row, 20 + count : 25 + count])


@pytest.mark.parametrize(("length", "counts"), [(5, (2, 4)), (5, (1, 3)), (70, (1, 66)), (64, (63, 2))])
def test_rejected_tokens_leave_no_trace(layer, x, memory, length, counts):
    counts = np.array(counts)
    tokens = x[:, 20 : 20 + length]
    rejected = np.arange(length) >= counts[:, None]
    one = keep(step(layer, tokens, memory)[1], counts)
    for rest in (np.roll(tokens, 3, axis=-1) * 50, np.float32(np.nan)):
        changed = np.where(rejected[..., None], rest, tokens)
        same_bits(keep(step(layer, changed, memory)[1], counts), one)


@pytest.mark.parametrize("length", [1, 5, 70])
def test_keeping_nothing_is_the_memory_before(layer, x, memory, length):
    _, extension = step(layer, x[:, 20 : 20 + length], memory)
    same_bits(keep(extension, np.zeros(ROWS, np.int32)), memory)


def test_kept_in_parts_or_at_once(layer, x, memory):
    at_once, parts = advance(layer, x[:, 20:25], memory), memory
    for start in range(20, 25):
        parts = advance(layer, x[:, start : start + 1], parts)
    jax.tree.map(close, parts, at_once)


def test_nodes_of_a_tree_are_rows_of_their_own(layer, torch_layer, x, memory):
    nodes = x[:, 20 : 20 + TREE.shape[1]]
    y, _ = step(layer, nodes, memory, TREE)
    for row, node in np.ndindex(*TREE.shape):
        path = [node]
        while TREE[row, path[0]] >= 0:
            path.insert(0, TREE[row, path[0]])
        expected = reference(torch_layer, np.concatenate([x[row, :20], nodes[row, path]])[None])
        close(y[row, node], expected[0, -1])


def test_a_tree_can_start_a_row(layer, torch_layer, x):
    nodes = x[:, : TREE.shape[1]]
    y, _ = step(layer, nodes, empty(), TREE)
    for row, path in enumerate(PATHS):
        close(y[row, path], reference(torch_layer, nodes[row, path][None])[0])


@pytest.mark.parametrize("counts", [(7, 7), (1, 6), (0, 3)])
def test_a_path_of_a_tree_is_kept(layer, torch_layer, x, memory, counts):
    nodes = x[:, 20 : 20 + TREE.shape[1]]
    _, extension = step(layer, nodes, memory, TREE)
    after = keep(extension, np.array(counts), PATHS)
    following = x[:, 50:55]
    y, _ = step(layer, following, after)
    for row, count in enumerate(counts):
        seen = np.concatenate([x[row, :20], nodes[row, PATHS[row, :count]], following[row]])
        close(y[row], reference(torch_layer, seen[None])[0, -5:])


def test_nodes_off_the_path_leave_no_trace(layer, x, memory):
    nodes, counts = x[:, 20 : 20 + TREE.shape[1]], np.array([4, 6])
    on = np.stack([np.isin(np.arange(TREE.shape[1]), PATHS[row, :count]) for row, count in enumerate(counts)])
    changed = np.where(on[..., None], nodes, -70 * nodes)
    # Past `count` a path may say anything, even name no node.
    ends = np.where(np.arange(PATHS.shape[1]) < counts[:, None], PATHS, -1)
    one = keep(step(layer, nodes, memory, TREE)[1], counts, PATHS)
    other = keep(step(layer, changed, memory, TREE)[1], counts, ends)
    same_bits(one, other)
    same_bits(keep(step(layer, nodes, memory, TREE)[1], np.zeros(ROWS, np.int32), PATHS), memory)


def test_half_precision(torch_layer, x):
    layer = build(torch_layer, jnp.bfloat16)
    assert layer.A_log.dtype == jnp.float32
    half = jnp.asarray(x, jnp.bfloat16)
    expected = reference(torch_layer, np.asarray(half, np.float32))
    y = whole(layer, half, np.zeros((ROWS, LENGTH), np.int32))
    assert y.dtype == jnp.bfloat16
    close(y, expected, atol=0.03 * np.abs(expected).max())
    memory = empty(dtype=jnp.bfloat16)
    stepped, extension = step(layer, half[:, :5], memory)
    assert stepped.dtype == jnp.bfloat16
    close(stepped.astype(jnp.float32), y[:, :5].astype(jnp.float32), atol=0.03 * np.abs(expected).max())
    after = keep(extension, np.array([5, 3]))
    assert jax.tree.map(lambda a: (a.shape, a.dtype), after) == jax.tree.map(lambda a: (a.shape, a.dtype), memory)


def test_every_dimension_of_every_parameter_is_named():
    state = nnx.state(nnx.eval_shape(lambda: GatedDeltaNet(SIZES, nnx.Rngs(0))))
    axes = {".".join(map(str, path)): leaf.get_metadata()["axes"] for path, leaf in nnx.to_flat_state(state)}
    assert axes == {
        "A_log": ("delta_heads",),
        "conv1d.weight": ("delta_channels", "single", "kernel"),
        "dt_bias": ("delta_heads",),
        "in_proj_a.weight": ("delta_heads", "embed"),
        "in_proj_b.weight": ("delta_heads", "embed"),
        "in_proj_qkv.weight": ("delta_channels", "embed"),
        "in_proj_z.weight": ("delta_values", "embed"),
        "norm.weight": ("head",),
        "out_proj.weight": ("embed", "delta_values"),
    }
