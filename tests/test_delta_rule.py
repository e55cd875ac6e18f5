"""The gated delta rule in its three forms against the torch functions of transformers, document by document."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from dflash_jax.models import delta_rule

ROWS, KEY_HEADS, HEADS, KEY_WIDTH, VALUE_WIDTH = 2, 2, 6, 16, 12
LENGTHS = (1, 63, 64, 65, 150)
GATES = {  # g and beta of [B, S, N]
    "ordinary": lambda draw, size: (-draw.exponential(0.3, size), draw.uniform(0, 1, size)),
    "abrupt": lambda draw, size: (-draw.choice([0.0, 0.01, 40.0, 3e4], size), draw.uniform(0, 1, size)),
    "extreme": lambda draw, size: (-draw.exponential(0.01, size), draw.choice([1e-6, 1 - 1e-6], size)),
    "lasting": lambda draw, size: (np.zeros(size), np.ones(size)),
}

chunked = jax.jit(delta_rule.chunked, static_argnames="chunk")
stepwise = jax.jit(delta_rule.stepwise)
along_tree = jax.jit(delta_rule.along_tree)


def draw_inputs(length, gates="ordinary", seed=0):
    """(q, k, v, g, beta) and a state, float32; queries and keys far from unit length."""
    draw = np.random.default_rng(seed)
    q, k = draw.normal(0.5, 3.0, (2, ROWS, length, KEY_HEADS, KEY_WIDTH))
    v = draw.normal(size=(ROWS, length, HEADS, VALUE_WIDTH))
    g, beta = GATES[gates](draw, (ROWS, length, HEADS))
    state = draw.normal(size=(ROWS, HEADS, KEY_WIDTH, VALUE_WIDTH))
    *inputs, state = (x.astype(np.float32) for x in (q, k, v, g, beta, state))
    return inputs, state


def reference(inputs, state, rule=torch_recurrent_gated_delta_rule):
    """y and the last state by torch."""
    q, k, v, g, beta = (torch.tensor(x) for x in inputs)
    y, state = rule(
        q,
        k,
        v,
        g,
        beta,
        initial_state=None if state is None else torch.tensor(state),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return y.numpy(), state.numpy()


def close(actual, expected, atol=1e-5):
    assert actual.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=1e-5, atol=atol)


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("length", LENGTHS)
def test_both_forms_are_the_torch_recurrence(length, gates):
    inputs, state = draw_inputs(length, gates, seed=length)
    expected = reference(inputs, state)
    for form in (chunked, stepwise):
        for actual, wanted in zip(form(*inputs, state=state), expected, strict=True):
            close(actual, wanted)


@pytest.mark.parametrize("length", [1, 150])
def test_without_a_state_rows_start_at_zero(length):
    inputs, _ = draw_inputs(length)
    for rule in (torch_recurrent_gated_delta_rule, torch_chunk_gated_delta_rule):
        for actual, wanted in zip(chunked(*inputs), reference(inputs, None, rule), strict=True):
            close(actual, wanted)


@pytest.mark.parametrize("chunk", [1, 7])
def test_the_size_of_a_chunk_does_not_matter(chunk):
    inputs, state = draw_inputs(65)
    for actual, wanted in zip(chunked(*inputs, state=state, chunk=chunk), reference(inputs, state), strict=True):
        close(actual, wanted)


def test_keys_that_are_all_alike():
    # The hardest system to solve: everything below its diagonal is 1.
    (q, k, v, _, _), state = draw_inputs(150)
    k = np.broadcast_to(k[:, :1], k.shape)
    gates = np.zeros((ROWS, 150, HEADS), np.float32)
    inputs = (q, k, v, gates, gates + 1)
    for actual, wanted in zip(chunked(*inputs, state=state), reference(inputs, state), strict=True):
        close(actual, wanted)


def test_decay_without_measure_leaves_no_nan():
    (q, k, v, g, beta), state = draw_inputs(150)
    forgotten = g.copy()
    forgotten[:, 70] = -1e30
    y, last = chunked(q, k, v, forgotten, beta, state=state)
    after = [x[:, 70:] for x in (q, k, v, g, beta)]
    expected = reference(after, None)
    close(y[:, 70:], expected[0])
    close(last, expected[1])


@pytest.mark.parametrize("gates", ["ordinary", "abrupt", "lasting"])
def test_documents_of_a_row_do_not_see_each_other(gates):
    inputs, state = draw_inputs(170, gates, seed=3)
    lengths = ((3, 61, 1, 64, 41), (100, 70))  # borders inside chunks, at their ends, and several in one
    segments = np.stack([np.repeat(5 + np.arange(len(row)), row) for row in lengths])
    y, last = chunked(*inputs, state=state, segment_ids=segments)
    for row, documents in enumerate(lengths):
        start = 0
        for document in documents:
            own = [x[row : row + 1, start : start + document] for x in inputs]
            before = state[row : row + 1] if start == 0 else None
            expected, expected_last = reference(own, before)
            close(y[row : row + 1, start : start + document], expected)
            start += document
        close(last[row : row + 1], expected_last)


def test_tokens_without_gate_and_strength_leave_the_state_to_the_bit():
    (q, k, v, g, beta), state = draw_inputs(9)
    _, last = stepwise(q, k, v, 0 * g, 0 * beta, state=state)
    assert np.asarray(last).tobytes() == state.tobytes()


@pytest.mark.parametrize("gates", GATES)
def test_nodes_of_a_tree_follow_their_own_path(gates):
    nodes = 14
    inputs, state = draw_inputs(nodes, gates, seed=4)
    draw = np.random.default_rng(5)
    parents = np.stack([[draw.integers(-1, node) if node else -1 for node in range(nodes)] for _ in range(ROWS)])
    y = along_tree(*inputs, state=state, parents=parents)
    for row, node in np.ndindex(ROWS, nodes):
        path = [node]
        while parents[row, path[0]] >= 0:
            path.insert(0, parents[row, path[0]])
        expected, _ = reference([x[row : row + 1, path] for x in inputs], state[row : row + 1])
        close(y[row, node], expected[0, -1])


def test_half_precision_inputs_are_computed_in_float32():
    inputs, state = draw_inputs(65)
    halves = [jnp.asarray(x, jnp.bfloat16) for x in inputs]
    rounded = [np.asarray(x, np.float32) for x in halves]
    expected = reference(rounded, state)
    for form in (functools.partial(chunked, state=state), functools.partial(stepwise, state=state)):
        for actual, wanted in zip(form(*halves), expected, strict=True):
            close(actual, wanted)
