"""How the next token is drawn from a target's logits l, and where its random numbers come from.

    l / temperature  ->  only the top_k largest  ->  only the smallest set with probability >= top_p  ->  draw

The draw adds Gumbel noise to what is left and takes the largest. Noise has an address: the seed, the conversation,
which of its answers it is, and the place in that answer. So an answer does not depend on what else is decoded
beside it, in which order, or whether the work was interrupted.
"""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Sampling:
    """temperature: 0 takes the largest logit; top_p: 1 keeps all tokens; top_k: 0 keeps all tokens."""

    temperature: float
    top_p: float = 1.0
    top_k: int = 0


GREEDY = Sampling(0.0)


def answer_keys(seed: int, conversations: jax.Array, turns: jax.Array) -> jax.Array:
    """[B] random keys of answers. conversations: [B], the conversation's index; turns: [B], the answer's in it."""
    start = jax.random.key(seed)
    return jax.vmap(lambda index, turn: jax.random.fold_in(jax.random.fold_in(start, index), turn))(
        conversations, turns
    )


def draw(logits: jax.Array, sampling: Sampling, *, keys: jax.Array | None, places: jax.Array) -> jax.Array:
    """[B] int32 tokens from logits [B, V] float32.

    keys: [B] keys of the answers, which greedy decoding does without; places: [B] the token's index in its answer.
    """
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    assert keys is not None
    added = noise(keys, places, vocab=logits.shape[-1])
    return jnp.argmax(filtered(logits, sampling) + added, axis=-1).astype(jnp.int32)


def noise(keys: jax.Array, places: jax.Array, *, vocab: int) -> jax.Array:
    """[B, V] float32 Gumbel noise of the tokens at places [B] in the answers with keys [B]."""
    return jax.vmap(lambda key, place: jax.random.gumbel(jax.random.fold_in(key, place), (vocab,)))(keys, places)


def filtered(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """logits [..., V] over a temperature above 0, -inf where top_k or top_p leave one out; ties share a fate."""
    scaled = logits / sampling.temperature
    if not sampling.top_k and sampling.top_p == 1:
        return scaled
    ordered = jnp.sort(scaled, axis=-1, descending=True)
    if 0 < sampling.top_k < logits.shape[-1]:
        ordered = _at_least(ordered, ordered[..., sampling.top_k - 1, None])
    kept = ordered > -jnp.inf
    if sampling.top_p < 1:
        share = jax.nn.softmax(ordered, axis=-1)
        kept &= jnp.cumsum(share, axis=-1) - share < sampling.top_p
    # The first token stays, whatever rounding makes of the zero before it.
    count = jnp.maximum(kept.sum(axis=-1, keepdims=True), 1)
    return _at_least(scaled, jnp.take_along_axis(ordered, count - 1, axis=-1))


def _at_least(logits: jax.Array, least: jax.Array) -> jax.Array:
    return jnp.where(logits >= least, logits, -jnp.inf)
