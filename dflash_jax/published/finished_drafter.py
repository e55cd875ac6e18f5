"""A trained drafter and what of its target belongs to it, and the tensors that it is published with.

A drafter whose width D is not the target's E projects embedded tokens down and its states up again. No published
format knows such projections, so that they are multiplied into an embedding and a head of the drafter's own:

    embed_tokens = scale T W_embed^T      [V, D] from the target's embedding T [V, E] and embed_proj [D, E]
    lm_head      = H W_head               [V, D] from the target's head H [V, E] and head_proj [E, D]

All tensors are made piece by piece when they are read; products are computed in float32.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from dflash_jax.errors import UserError
from dflash_jax.models.drafter import DrafterConfig
from dflash_jax.models.target import TargetConfig
from dflash_jax.published.config_json import text_fields
from dflash_jax.published.drafter_fields import DrafterFields, TargetFacts
from dflash_jax.published.drafter_folder import EMBEDDING, HEAD
from dflash_jax.published.stored import FLOATS, Index, Stored
from dflash_jax.published.targets import TargetFiles

SPELLINGS = {"float32": "F32", "bfloat16": "BF16"}  # of dtypes, in safetensors files
PROJECTIONS = ("embed_proj.weight", "head_proj.weight")


@dataclasses.dataclass(frozen=True)
class TargetEnds:
    """A target's embedding [V, E] and head [V, E], in its files, and what an export says of it."""

    embedding: Stored
    head: Stored
    facts: TargetFacts
    config: TargetConfig

    @classmethod
    def of(cls, files: TargetFiles) -> "TargetEnds":
        """Those of a target's files, of which nothing but configuration and headers is read."""
        config, fields, place = files.config, text_fields(files.fields), files.place
        placed = {found.name: stored for name, stored in files.tensors() if (found := place(name)) is not None}
        embedding = placed["model.embed_tokens.weight"]
        facts = TargetFacts(
            place=str(files.path) if files.path.is_dir() else None,
            architectures=tuple(files.fields.get("architectures") or ()),
            layers=config.layers,
            vocab=config.vocab,
            max_positions=fields["max_position_embeddings"],
            tied=config.tied,
        )
        return cls(embedding, embedding if config.tied else placed["lm_head.weight"], facts, config)


@dataclasses.dataclass(frozen=True)
class FinishedDrafter:
    """params: of `Drafter`, by name; draft_tokens: [V'] ascending tokens that its head covers, None for all;
    own_embedding, own_head: those of a published drafter that has them."""

    config: DrafterConfig
    taps: tuple[int, ...]
    params: Mapping[str, Stored]
    ends: TargetEnds
    draft_tokens: np.ndarray | None = None
    own_embedding: Stored | None = None
    own_head: Stored | None = None

    @property
    def is_projected(self) -> bool:
        """Whether it has projections to and from another width."""
        return self.config.width != self.config.target_width

    def covering_all(self) -> "FinishedDrafter":
        """The same with a head over all tokens. Raises UserError where the other rows are not known."""
        if self.draft_tokens is not None and self.own_head is not None:
            raise UserError(
                f"format: the drafter's own head covers {len(self.draft_tokens)} of {self.ends.facts.vocab} "
                "tokens, which z-lab's format cannot say; use format=speculators, or export the run itself"
            )
        return dataclasses.replace(self, draft_tokens=None)

    def fields(self) -> DrafterFields:
        """What its config.json has to say."""
        config, target = self.config, self.ends.config
        has_own_ends = self.is_projected or self.own_head is not None
        return DrafterFields(
            dataclasses.replace(config, target_width=config.width),
            self.taps,
            vocab=self.ends.facts.vocab,
            draft_vocab=None if self.draft_tokens is None else len(self.draft_tokens),
            embedding_scale=1.0 if has_own_ends else target.embedding_scale or 1.0,
            softcap=target.logit_softcap,
        )

    def embedding(self) -> Stored:
        """[V, D or E] what embeds a block, before the target's scale where it is the target's."""
        if self.own_embedding is not None:
            return self.own_embedding
        if not self.is_projected:
            return self.ends.embedding
        scale = np.float32(self.ends.config.embedding_scale or 1.0)
        return times(self.ends.embedding, scale * self.params["embed_proj.weight"].read(()).T)

    def head(self) -> Stored:
        """[V or V', D or E] what turns states into logits."""
        if self.own_head is not None:
            return self.own_head
        rows = self.ends.head if self.draft_tokens is None else chosen(self.ends.head, self.draft_tokens)
        return times(rows, self.params["head_proj.weight"].read(())) if self.is_projected else rows

    def tensors(self, dtype: str) -> dict[str, Stored]:
        """Everything in its file; floats in `dtype`, "float32" or "bfloat16"."""
        found = {name: stored for name, stored in self.params.items() if name not in PROJECTIONS}
        if self.fields().has_own_ends:
            found[EMBEDDING] = self.embedding()
        if self.fields().has_own_ends or self.draft_tokens is not None:
            found[HEAD] = self.head()
        found = {name: rounded(stored, dtype) for name, stored in found.items()}
        if self.draft_tokens is not None:
            tokens = self.draft_tokens.astype(np.int64)
            offsets, drafted = tokens - np.arange(len(tokens)), np.zeros(self.ends.facts.vocab, bool)
            drafted[tokens] = True
            found["d2t"] = Stored(offsets.shape, "I64", offsets.__getitem__)
            found["t2d"] = Stored(drafted.shape, "BOOL", drafted.__getitem__)
        return found


def rounded(stored: Stored, dtype: str) -> Stored:
    """A tensor in another dtype."""
    spelling = SPELLINGS[dtype]
    return Stored(stored.shape, spelling, lambda index: stored.read(index).astype(FLOATS[spelling], copy=False))


def chosen(stored: Stored, rows: np.ndarray) -> Stored:
    """Some rows of a tensor, ascending."""

    def read(index: Index) -> np.ndarray:
        wanted = rows[index[0]] if index else rows
        return stored.read((slice(int(wanted[0]), int(wanted[-1]) + 1),))[wanted - wanted[0]]

    return Stored((len(rows), *stored.shape[1:]), stored.dtype, read)


def times(stored: Stored, matrix: np.ndarray) -> Stored:
    """[V, D] float32: the product of a stored [V, E] and a matrix [E, D], which may be read by rows."""

    def read(index: Index) -> np.ndarray:
        return stored.read(index).astype(np.float32) @ matrix.astype(np.float32)

    return Stored((stored.shape[0], matrix.shape[1]), "F32", read)
