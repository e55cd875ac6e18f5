"""The training objective of one batch: anchors -> blocks -> drafter -> frozen head -> weighted loss sums.

    L = sum_{a, k} w_{a,k} loss(head(h_{a,k}), x_{a+k}) / sum_{a, k} w_{a,k}

The two sums are returned, not their quotient; the step divides once, after adding over micro-batches.
"""

import dataclasses
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.batch import Batch
from dflash_jax.models.drafter import Drafter
from dflash_jax.objective.acceptance import Acceptance, acceptance, walk
from dflash_jax.objective.anchors import block_anchors, block_labels, token_keys, valid_anchors
from dflash_jax.objective.head import Head, HeadResult, Rule, Slots, head_loss
from dflash_jax.objective.head_sample import Draw, HeadSample
from dflash_jax.objective.noise import with_noise
from dflash_jax.objective.terms import needs_teacher


class TargetStates(NamedTuple):
    """What the target says of a batch. features: [B, S, T * E], the taps; last: [B, S, E], after the final norm,
    or None where no term of the objective compares with the target."""

    features: jax.Array
    last: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Frozen:
    """The target's arrays that the drafter uses: embedding [V, E], head [V', E], draft_tokens [V'] or None.

    Their dtype is the one that the drafter computes in, in training as in decoding. embedding_scale multiplies
    embedded tokens, softcap bounds logits (c tanh(l / c)), both [] float32 and None where the target has none.
    With a draft vocabulary, head holds only the rows of draft_tokens (ascending token ids) and drafted
    indices are looked up there; without one, head has all V rows and draft_tokens is None. With a sample, a
    training loss looks at part of the head at a time.
    """

    embedding: jax.Array
    head: jax.Array
    draft_tokens: jax.Array | None
    sample: HeadSample | None = None
    embedding_scale: jax.Array | None = None
    softcap: jax.Array | None = None

    def covering(self, draft_tokens: np.ndarray | None) -> "Frozen":
        """The same with no more of its head than the rows of draft_tokens [V'], ascending; None: all of it."""
        if draft_tokens is None:
            return self
        chosen = jax.device_put(jnp.asarray(draft_tokens), self.head.sharding)
        return dataclasses.replace(self, head=self.head[draft_tokens], draft_tokens=chosen)

    def index_of(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Rows of the head for tokens [...], and whether each token has one."""
        if self.draft_tokens is None:
            return tokens, jnp.ones(tokens.shape, bool)
        return _look_up(self.draft_tokens, tokens)

    def softmax_over(self, labels: jax.Array, draw: Draw | None) -> tuple[Head, jax.Array, jax.Array]:
        """The part of the head that a loss normalises over, the labels' rows in it, and which labels have one.

        The whole head is taken without a draw, and where there is no sample to draw from.
        """
        if self.sample is None or draw is None:
            offsets = jnp.zeros(self.head.shape[0], jnp.float32)
            return Head(self.head, offsets, self.softcap), *self.index_of(labels)
        tokens, offsets = self.sample.draw(draw)
        return Head(self.head[tokens], offsets, self.softcap), *_look_up(self.sample.labels, labels)

    def tokens_of(self, index: jax.Array) -> jax.Array:
        """Token ids of head rows [...]."""
        return index if self.draft_tokens is None else self.draft_tokens[index]

    def over_vocabulary(self, logits: jax.Array) -> jax.Array:
        """[..., V] from logits [..., V'] of the head's rows: -inf for tokens that have none."""
        if self.draft_tokens is None:
            return logits
        everywhere = jnp.full((*logits.shape[:-1], self.embedding.shape[0]), -jnp.inf, logits.dtype)
        return everywhere.at[..., self.draft_tokens].set(logits)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[..., V'] float32 logits of drafter states [..., E]."""
        return Head(self.head, jnp.zeros(()), self.softcap).logits(hidden)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """[..., E]: embedded tokens [...], as the drafter receives them."""
        rows = self.embedding[tokens]
        return rows if self.embedding_scale is None else rows * self.embedding_scale.astype(rows.dtype)


def _look_up(ascending: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    index = jnp.minimum(jnp.searchsorted(ascending, tokens), ascending.shape[0] - 1)
    return index, ascending[index] == tokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossSums:
    """loss: sum of weighted losses; weight: sum of weights; terms: sums of each term's weighted losses by name;
    acceptance: its sums. All float32."""

    loss: jax.Array
    weight: jax.Array
    terms: dict[str, jax.Array]
    acceptance: Acceptance

    def __add__(self, other: "LossSums") -> "LossSums":
        return jax.tree.map(lambda a, b: a + b, self, other)

    def measures(self) -> dict[str, jax.Array]:
        """The means these sums stand for, under the names of the log; *_by_position are [W - 1]."""
        weight = jnp.maximum(self.weight, 1e-9)
        found = {"loss": self.loss / weight}
        if len(self.terms) > 1:
            found |= {f"loss_{name}": total / weight for name, total in self.terms.items()}
        if needs_teacher(self.terms):
            found["expected_accept_len"] = 1.0 + self.acceptance.expected / jnp.maximum(self.acceptance.blocks, 1)
        return found | self.acceptance.measures()


def embed_blocks(tokens: jax.Array, frozen: Frozen, *, block_size: int, mask_token: int) -> jax.Array:
    """[..., W, E] embeddings of the blocks [x_a, MASK, .. MASK] of anchor tokens [...]."""
    slots = jnp.full((*tokens.shape, block_size), mask_token, tokens.dtype).at[..., 0].set(tokens)
    return frozen.embed(slots)


def block_states(
    drafter: Drafter,
    batch: Batch,
    features: jax.Array,
    frozen: Frozen,
    *,
    anchors: jax.Array,
    kept: jax.Array,
    width: int | None = None,
) -> jax.Array:
    """Drafter states [B, A, W, E] of every block of a batch, each exactly as inference would compute it.

    features: [B, S, T * E] of the target; anchors, kept: [B, A]; width: slots, None for the drafter's block_size.
    """
    config, length = drafter.config, batch.tokens.shape[1]
    width = width or config.block_size

    def at_anchor(values: jax.Array) -> jax.Array:
        return jnp.take_along_axis(values, anchors, axis=1)

    block = embed_blocks(at_anchor(batch.tokens), frozen, block_size=width, mask_token=config.mask_token)
    positions = at_anchor(batch.positions)[:, :, None] + jnp.arange(width)
    # TRAP: strictly before the anchor; at inference the anchor's own features do not exist yet.
    before = jnp.arange(length)[None, None, :] < anchors[:, :, None]
    same = batch.segment_ids[:, None, :] == at_anchor(batch.segment_ids)[:, :, None]
    visible = before & same & kept[:, :, None]
    context = drafter.context(features.astype(block.dtype), batch.positions)
    return drafter(block, positions, context, visible=visible, context_positions=batch.positions)


def block_loss(
    drafter: Drafter,
    batch: Batch,
    states: TargetStates,
    frozen: Frozen,
    *,
    rule: Rule,
    anchor_count: int,
    seed: int,
    head_chunk: int,
    head_draw: Draw | None,
    noise_std: jax.Array | None = None,
) -> LossSums:
    """Loss and acceptance sums of one batch with freshly drawn anchors.

    anchor_count: blocks of a row; seed: of the anchors' draw and of the noise; head_chunk: blocks whose logits are
    alive at a time; head_draw: tokens in the softmax, None for all; noise_std: [] of the Gaussian noise that is
    added to the features, and to nothing else.
    """
    with jax.named_scope("anchors"):
        anchors, kept = block_anchors(batch, seed=seed, count=anchor_count)
    if noise_std is not None:
        states = states._replace(features=with_noise(token_keys(seed, batch), states.features, noise_std))
    return anchored_loss(
        drafter,
        batch,
        states,
        frozen,
        rule=rule,
        anchors=anchors,
        kept=kept,
        head_chunk=head_chunk,
        head_draw=head_draw,
    )


def anchored_loss(
    drafter: Drafter,
    batch: Batch,
    states: TargetStates,
    frozen: Frozen,
    *,
    rule: Rule,
    anchors: jax.Array,
    kept: jax.Array,
    head_chunk: int,
    head_draw: Draw | None,
) -> LossSums:
    """`block_loss` at given anchors [B, A]; blocks with kept [B, A] False weigh nothing."""
    width = drafter.config.block_size
    labels, mask = block_labels(
        batch.tokens, batch.loss_mask, batch.segment_ids, anchors=anchors, kept=kept, width=width
    )
    hidden = block_states(drafter, batch, states.features, frozen, anchors=anchors, kept=kept)
    # Slot 0 predicts nothing, so the head never sees it.
    hidden, labels, mask = hidden[:, :, 1:], labels[:, :, 1:], mask[:, :, 1:]
    head, index, known = frozen.softmax_over(labels, head_draw)

    def by_block(values: jax.Array) -> jax.Array:
        return values.reshape(-1, *values.shape[2:])

    teacher = None if states.last is None else by_block(teacher_states(states.last, anchors, width=width))
    with jax.named_scope("head"):
        slots = Slots(by_block(hidden), by_block(index), by_block(mask & known), teacher)
        found = cast(HeadResult, head_loss(slots, head, rule, head_chunk))  # custom_vjp hides the type
    # A label outside the head is never drafted.
    ranks = jnp.where(known, found.ranks.reshape(mask.shape), head.rows.shape[0])
    measured = acceptance(ranks, mask, found.overlaps.reshape(mask.shape))
    streaks = jnp.cumprod((ranks == 0) & mask, axis=-1).sum(axis=-1)
    tokens, rounds = walk(streaks, anchors, kept, valid_anchors(batch.loss_mask, batch.segment_ids))
    measured = dataclasses.replace(measured, walk_tokens=tokens, walk_rounds=rounds)
    return LossSums(found.total, found.weight, found.terms, measured)


def teacher_states(last: jax.Array, anchors: jax.Array, *, width: int) -> jax.Array:
    """[B, A, W - 1, E]: the target's last states that predict what slots 1.. must propose.

    TRAP: slot k stands at position a + k, and the target predicts that token at position a + k - 1.
    """
    index = jnp.minimum(anchors[:, :, None] + jnp.arange(width - 1), last.shape[1] - 1)
    return jax.vmap(lambda row, at: row[at])(last, index)
