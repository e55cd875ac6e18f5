"""The gated delta rule: linear attention whose state is a small matrix per value head, in three forms.

    S_t = exp(g_t) S_{t-1} + k_t (x) d_t,   d_t = beta_t (v_t - exp(g_t) k_t S_{t-1}),   y_t = q_t S_t

`stepwise` is this recurrence, `along_tree` the same where a token follows any earlier one, and `chunked`
computes C tokens at once: with c the sums of g from the chunk's start and P_ij = exp(c_i - c_j) for j <= i,
all d of a chunk solve (I + beta * (k k^T * P below the diagonal)) d = beta * (v - exp(c) k S).

q and k are made unit vectors and q is scaled by Dk^-0.5. Everything is float32, whatever the inputs are.
Shapes here: q, k [B, S, G, Dk] with G key heads; v [B, S, N, Dv] with N value heads, N / G of them in a row
sharing a key head; g <= 0 and beta [B, S, N]; a state is [B, N, Dk, Dv].
"""

import functools

import jax
import jax.numpy as jnp

# Accelerators otherwise shorten the factors of a float32 product.
_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def chunked(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    *,
    state: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    chunk: int = 64,
) -> tuple[jax.Array, jax.Array]:
    """Outputs [B, S, N, Dv] and the state after the last token, float32, `chunk` tokens at a time.

    state: the state before (None: zeros), which belongs to the segment of the first token.
    segment_ids: [B, S] int32, equal and side by side within a document; a document sees nothing of the one
    before it, and the state returned is the last document's. None: each row is one document.
    """
    batch, length, key_heads, key_width = q.shape
    heads, value_width = v.shape[2:]
    per_key = heads // key_heads
    if state is None:
        state = jnp.zeros((batch, heads, key_width, value_width), jnp.float32)
    if segment_ids is None:
        segment_ids = jnp.zeros((batch, length), jnp.int32)

    def split(x: jax.Array, mode: str = "constant") -> jax.Array:
        # [B, S, ...] -> [chunks, B, C, ...]; the zeros g and beta of padding change nothing.
        x = jnp.pad(x, [(0, 0), (0, -length % chunk)] + [(0, 0)] * (x.ndim - 2), mode=mode)
        return x.reshape(batch, -1, chunk, *x.shape[2:]).swapaxes(0, 1)

    def by_value_head(x: jax.Array) -> jax.Array:
        # [chunks, B, C, N, ...] -> [chunks, B, G, N / G, C, ...]
        x = jnp.moveaxis(split(x.astype(jnp.float32)), 2, 3)
        return x.reshape(*x.shape[:2], key_heads, per_key, *x.shape[3:])

    q, k = split(_unit(q) * key_width**-0.5), split(_unit(k))
    v, g, beta = by_value_head(v), by_value_head(g), by_value_head(beta)
    segments = split(segment_ids, "edge")
    before = jnp.concatenate([segments[:1, :, 0], segments[:-1, :, -1]])  # the segment that carries over

    # In einsums: n chunk, b row, h key head, r value head of a key head, i and j token, k and v widths.
    order = jnp.arange(chunk)
    # Each sum on its own: a difference of two long sums would lose small gates that follow large ones.
    gates = jnp.where(order[:, None] > order, g[..., None], 0.0)
    between = _einsum("ij,...jk->...ik", jnp.tri(chunk), gates)
    sees = (segments[..., :, None] == segments[..., None, :]) & (order[:, None] >= order)
    decay = jnp.where(sees[:, :, None, None], jnp.exp(between), 0.0)
    carries = (segments == before[..., None])[:, :, None, None]
    from_start = jnp.where(carries, jnp.exp(g[..., :1] + between[..., 0]), 0.0)

    products = _einsum("nbihk,nbjhk->nbhij", k, k)[:, :, :, None]
    scores = _einsum("nbihk,nbjhk->nbhij", q, k)[:, :, :, None] * decay
    inverse = _inverse(beta[..., None] * products * decay)
    solve = inverse * beta[..., None, :]

    def advance(state, at):
        q, k, v, solve, scores, from_start, to_end = at
        known = from_start[..., None] * _einsum("bihk,bhrkv->bhriv", k, state)
        delta = _einsum("bhrij,bhrjv->bhriv", solve, v - known)
        y = from_start[..., None] * _einsum("bihk,bhrkv->bhriv", q, state)
        y = y + _einsum("bhrij,bhrjv->bhriv", scores, delta)
        state = from_start[..., -1, None, None] * state
        return state + _einsum("bjhk,bhrjv->bhrkv", k, to_end[..., None] * delta), y

    state = state.astype(jnp.float32).reshape(batch, key_heads, per_key, key_width, value_width)
    state, y = jax.lax.scan(advance, state, (q, k, v, solve, scores, from_start, decay[..., -1, :]))
    y = y.transpose(1, 0, 4, 2, 3, 5).reshape(batch, -1, heads, value_width)[:, :length]
    return y, state.reshape(batch, heads, key_width, value_width)


def stepwise(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, *, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Outputs [B, S, N, Dv] and the state after the last token, float32, token by token.

    A token with g = 0 and beta = 0 leaves the state as it is, to the bit.
    """

    def advance(state, token):
        state = _follow(state, token)
        return state, _read(state, token)

    state, y = jax.lax.scan(advance, state.astype(jnp.float32), _by_token(q, k, v, g, beta))
    return y.swapaxes(0, 1), state


def along_tree(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    *,
    state: jax.Array,
    parents: jax.Array,
) -> jax.Array:
    """Outputs [B, S, N, Dv] float32 of S nodes, each of which follows its parent.

    parents: [B, S] int32, the parent's index among the nodes, smaller than the node's own; -1 for a node that
    follows `state`. Holds S + 1 states.
    """
    batch, nodes = parents.shape
    rows = jnp.arange(batch)
    states = jnp.zeros((nodes + 1, *state.shape), jnp.float32).at[0].set(state)

    def advance(states, at):
        node, parent, token = at
        after = _follow(states[parent + 1, rows], token)
        return states.at[node + 1].set(after), _read(after, token)

    _, y = jax.lax.scan(advance, states, (jnp.arange(nodes), parents.T, _by_token(q, k, v, g, beta)))
    return y.swapaxes(0, 1)


def _inverse(below: jax.Array) -> jax.Array:
    """(I + what lies below the diagonal of [..., C, C])^-1, by joining the inverses of blocks two by two.

    Products only, which accelerators and meshes take better than a triangular solve. Nothing grows on the way:
    no entry of these inverses exceeds 1 where keys are unit vectors, beta at most 1 and decays at most 1.
    """
    size = below.shape[-1]

    def join(level, inverse):
        block = jnp.arange(size) >> level
        pairs = (block[:, None] % 2 == 1) & (block[:, None] == block + 1)
        product = _einsum("...ij,...jk->...ik", jnp.where(pairs, below, 0.0), inverse)
        return inverse - _einsum("...ij,...jk->...ik", inverse, product)

    return jax.lax.fori_loop(0, (size - 1).bit_length(), join, jnp.broadcast_to(jnp.eye(size), below.shape))


def _follow(state: jax.Array, token: tuple[jax.Array, ...]) -> jax.Array:
    """The state after one token of [B, N, ...]."""
    _, k, v, g, beta = token
    state = state * jnp.exp(g)[..., None, None]
    delta = (v - jnp.sum(state * k[..., None], axis=-2)) * beta[..., None]
    return state + k[..., None] * delta[..., None, :]


def _read(state: jax.Array, token: tuple[jax.Array, ...]) -> jax.Array:
    return jnp.sum(state * token[0][..., None], axis=-2)


def _by_token(q, k, v, g, beta) -> tuple[jax.Array, ...]:
    """The rule's inputs as [S, B, N, ...], keys and queries of unit length and one per value head."""
    per_key = v.shape[2] // k.shape[2]
    q, k = (jnp.repeat(x, per_key, axis=2) for x in (_unit(q) * q.shape[-1] ** -0.5, _unit(k)))
    return tuple(x.astype(jnp.float32).swapaxes(0, 1) for x in (q, k, v, g, beta))


def _unit(x: jax.Array) -> jax.Array:
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)
