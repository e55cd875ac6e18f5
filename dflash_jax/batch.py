"""The one record that travels through training: a batch of padded rows."""

import dataclasses
from typing import Any

import jax

Array = Any  # numpy on the host, jax.Array on a mesh


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """B rows of S tokens. Segment s of a row is its s-th record; a padding position has segment 0.

    tokens, positions, segment_ids: [B, S] int32; positions restart in each segment.
    loss_mask: [B, S] bool, True on tokens that the drafter learns to predict.
    record_ids: [B, R] int32, index in the data set of segments 1 to R of the row, -1 for one that is not there;
    R is 1 but for packed rows. epochs: [B] int32, the pass that the row belongs to.
    """

    tokens: Array
    positions: Array
    segment_ids: Array
    loss_mask: Array
    record_ids: Array
    epochs: Array
