"""The sparse MLP of a mixture-of-experts target: every token runs through the few experts it chooses.

    p = softmax(gate x);   c_1 .. c_C = the C experts of largest p;   a_c = p_c (over their sum, if normalised)
    y = sum_c a_c down_c(silu(gate_c x) * up_c x)  [+ sigmoid(shared_expert_gate x) * shared_expert(x)]

X is the number of experts and C that of the chosen ones. No token is ever dropped. The weights stay where they
are and the tokens come to them: each expert has a queue of its tokens, and a loop takes blocks from the queues
of LANES experts at a time. Only the queues' lengths decide how often the loop runs; an expert that nobody
chose costs nothing unless another one runs beside it. Forward only: a loop of unknown length has no gradient.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx

from dflash_jax.errors import UserError
from dflash_jax.models.layers import Linear, SwiGLU, weight

# Experts that run side by side: the first of each of so many equal runs of experts, then the second of each, ...
# A mesh axis that splits the experts over a divisor of this many devices leaves each device its own lanes.
LANES = 8


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """Sizes of a sparse MLP; `mlp_width` is one expert's, `shared_mlp_width` None where none is shared."""

    width: int
    experts: int
    chosen: int
    mlp_width: int
    normalised: bool
    shared_mlp_width: int | None

    def __post_init__(self):
        if not 1 <= self.chosen <= self.experts:
            raise UserError(
                f"target: {self.chosen} experts per token, but there are {self.experts}; "
                "num_experts_per_tok must lie between 1 and their number"
            )


class Experts(nnx.Module):
    """All experts' weights, stacked: gate_up_proj [X, 2F, E] (gate first) and down_proj [X, E, F]."""

    def __init__(self, config: ExpertsConfig, rngs: nnx.Rngs):
        c = config
        self.gate_up_proj = weight(rngs, "experts expert_mlp embed", c.experts, 2 * c.mlp_width, c.width)
        self.down_proj = weight(rngs, "experts embed expert_mlp", c.experts, c.width, c.mlp_width)

    def __call__(self, x: jax.Array, chosen: jax.Array, shares: jax.Array) -> jax.Array:
        """[B, S, E] from tokens x [B, S, E], their experts [B, S, C] and those experts' shares [B, S, C].

        Rows never meet, so that splitting them over devices moves nothing.
        """
        (batch, length, width), count = x.shape, chosen.shape[-1]
        experts = self.down_proj.shape[0]
        lanes = math.gcd(experts, LANES)
        block = block_length(length, count, experts)

        queues, loads = _queues(chosen, experts, room=-(-length // block) * block)
        queues = queues.reshape(batch, lanes, -1, queues.shape[-1])
        # The n-th experts of all lanes take as many steps as the fullest of their queues needs.
        steps = -(-loads.reshape(batch, lanes, -1).max(axis=(0, 1)) // block)
        ends = jnp.cumsum(steps)
        shares = shares.reshape(batch, -1)

        def run(step, total):
            n = jnp.sum(step >= ends)
            start = (step - ends[n] + steps[n]) * block
            pairs = jax.lax.dynamic_slice(queues, (0, 0, n, start), (batch, lanes, 1, block))[:, :, 0]
            tokens = pairs // count
            gate_up = _expert(self.gate_up_proj, lanes, n, x.dtype)
            gate, up = jnp.split(jnp.einsum("BGME,GFE->BGMF", _pick(x, tokens), gate_up), 2, axis=-1)
            inner = (jax.nn.silu(gate) * up * _pick(shares, pairs)[..., None]).astype(x.dtype)
            down = _expert(self.down_proj, lanes, n, x.dtype)
            y = jnp.einsum("BGMF,GEF->BGME", inner, down, preferred_element_type=jnp.float32)
            return jax.vmap(jax.vmap(_add))(total, tokens, y)

        # A sum for each lane, added up once at the end: that is all that devices with other experts exchange.
        total = jnp.zeros((batch, lanes, length, width), jnp.float32)
        return jax.lax.fori_loop(0, ends[-1], run, total).sum(axis=1).astype(x.dtype)


class SparseMLP(nnx.Module):
    """A router, its experts and, in some families, an expert that every token shares.

    The router and the shared expert's gate name their output "router", not "experts": they are small, and whole
    on every device they need no exchange before a token can choose.
    """

    def __init__(self, config: ExpertsConfig, rngs: nnx.Rngs):
        c = config
        self.config = c
        self.gate = Linear(rngs, "router embed", c.experts, c.width)
        self.experts = Experts(c, rngs)
        if c.shared_mlp_width is not None:
            self.shared_expert = SwiGLU(rngs, c.width, c.shared_mlp_width)
            self.shared_expert_gate = Linear(rngs, "router embed", 1, c.width)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., E] from [..., E]; the axis before the last holds a row's tokens, all before it are rows.

        A token's result does not depend on its company; only the shape of x can change how it is rounded.
        """
        rows = jnp.atleast_2d(x)
        rows = rows.reshape(-1, *rows.shape[-2:])
        # Logits rounded to bf16 would tie, so they are float32 from the sum on.
        logits = jnp.einsum(
            "...E,XE->...X", rows, self.gate.weight.astype(x.dtype), preferred_element_type=jnp.float32
        )
        with jax.named_scope("route"):
            chosen, shares = route(logits, self.config.chosen, normalised=self.config.normalised)
        with jax.named_scope("experts"):
            y = self.experts(rows, chosen, shares).reshape(x.shape)
        if self.config.shared_mlp_width is not None:
            y = y + jax.nn.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return y


def route(logits: jax.Array, count: int, *, normalised: bool) -> tuple[jax.Array, jax.Array]:
    """The `count` most probable experts of each token, best first, and their shares: int32 and float32 [..., C].

    logits: [..., X] float32; of equal ones the first wins. Shares are probabilities among all experts, or,
    if normalised, among the chosen ones.
    """
    probabilities = left = jax.nn.softmax(logits, axis=-1)
    chosen = []
    # XLA splits argmax over devices as it splits its operand; for top_k it would gather all tokens first.
    for _ in range(count):
        chosen.append(jnp.argmax(left, axis=-1))
        left = jnp.where(jnp.arange(logits.shape[-1]) == chosen[-1][..., None], -1.0, left)
    chosen = jnp.stack(chosen, axis=-1)
    shares = jnp.take_along_axis(probabilities, chosen, axis=-1)
    return chosen, shares / shares.sum(axis=-1, keepdims=True) if normalised else shares


def block_length(length: int, count: int, experts: int) -> int:
    """Tokens that an expert takes at a time: half of an even share of the row, as a multiple of 8."""
    # Longer blocks are emptier at a queue's end, shorter ones mean more steps.
    return min(length, -(-length * count // (2 * experts * 8)) * 8)


def _queues(chosen: jax.Array, experts: int, *, room: int) -> tuple[jax.Array, jax.Array]:
    """Each expert's (token, choice) pairs in the order of the row's tokens, [B, X, room], and their number [B, X].

    chosen: [B, S, C]. Choice c of token s is pair C s + c. Places after the last pair hold pairs of tokens
    S, S + 1, ..., which do not exist.
    """
    length, count = chosen.shape[1:]
    among = (chosen[..., None] == jnp.arange(experts)).any(axis=-2)
    so_far = jnp.cumsum(among, axis=1, dtype=jnp.int32)
    places = jnp.take_along_axis(so_far, chosen, axis=-1) - 1
    pairs = jnp.arange(length * count).reshape(length, count)
    empty = jnp.broadcast_to((length + jnp.arange(room)) * count, (experts, room))
    fill = jax.vmap(lambda expert, place: empty.at[expert, place].set(pairs, unique_indices=True))
    return fill(chosen, places), so_far[:, -1]


def _expert(stack: nnx.Param, lanes: int, n: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The n-th expert of each lane, [G, ...] of [X, ...]."""
    by_lane = stack[...].reshape(lanes, -1, *stack.shape[1:])
    return jax.lax.dynamic_index_in_dim(by_lane, n, axis=1, keepdims=False).astype(dtype)


def _pick(values: jax.Array, at: jax.Array) -> jax.Array:
    """values[b, at[b, ...]] for each row b, and zeros for what does not exist."""
    return jax.vmap(lambda row, index: row.at[index].get(mode="fill", fill_value=0))(values, at)


def _add(total: jax.Array, tokens: jax.Array, y: jax.Array) -> jax.Array:
    # A block is one expert's, so it never holds a token twice: no order of additions to depend on.
    return total.at[tokens].add(y, mode="drop", unique_indices=True)
