"""The one record that travels through training: a batch of padded rows."""

import dataclasses
from typing import Any

import jax

Array = Any  # numpy on the host, jax.Array on a mesh


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """B rows of S tokens. A padding position has segment 0; a row without a record has record id -1.

    tokens, positions, segment_ids: [B, S] int32; positions restart in each segment (document).
    loss_mask: [B, S] bool, True on tokens that the drafter learns to predict.
    record_ids: [B] int32, the row's index in the data set; epochs: [B] int32, the pass it belongs to.
    """

    tokens: Array
    positions: Array
    segment_ids: Array
    loss_mask: Array
    record_ids: Array
    epochs: Array
