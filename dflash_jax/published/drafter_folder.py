"""A published DFlash drafter on disk, in z-lab's or in speculators' format: its configuration and its tensors."""

import dataclasses
import math
import pathlib
from collections.abc import Iterator
from typing import Self

import numpy as np

from dflash_jax.errors import UserError
from dflash_jax.models.drafter import DrafterConfig
from dflash_jax.models.target import TargetConfig
from dflash_jax.published import hub_folder, speculators_format, zlab_format
from dflash_jax.published.drafter_fields import DrafterFields
from dflash_jax.published.speculators_format import COPIES, VOCABULARY
from dflash_jax.published.stored import Stored

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
# Gemma's scale, the root of its width, is rounded to bfloat16 by some who write it down.
SCALE_TOLERANCE = 2.0**-8


@dataclasses.dataclass(frozen=True)
class DrafterFolder:
    """A drafter's folder; fields: what its config.json says."""

    path: pathlib.Path
    fields: DrafterFields
    speculators: bool = False

    @classmethod
    def open(cls, path: pathlib.Path) -> Self:
        """Read config.json, no weights. Raises UserError naming a key that is missing or not supported."""
        given = hub_folder.read_config(path)
        speculators = speculators_format.is_speculators(given)
        try:
            fields = (speculators_format if speculators else zlab_format).read(given)
        except UserError as error:
            raise UserError(f"{path}/config.json: {error}") from None
        return cls(path, fields, speculators)

    @property
    def config(self) -> DrafterConfig:
        """The drafter's sizes and semantics."""
        return self.fields.config

    @property
    def taps(self) -> tuple[int, ...]:
        """The target layers that feed it."""
        return self.fields.taps

    def tensors(self) -> Iterator[tuple[str, Stored]]:
        """(name, tensor) of everything that should be a parameter of `Drafter`, under its name there."""
        apart = {EMBEDDING, HEAD} if self.fields.has_own_ends else set()
        if self.speculators:
            apart |= {*COPIES, *VOCABULARY}
        return ((name, stored) for name, stored in hub_folder.tensors(self.path) if name not in apart)

    def own_embedding(self) -> Stored | None:
        """Its own embedding [V, D], with the target's scale in it; None where it uses the target's."""
        return self._own(EMBEDDING, self.fields.vocab)

    def own_head(self) -> Stored | None:
        """Its own head [V, D], or [V', D] with a draft vocabulary; None where it uses the target's."""
        return self._own(HEAD, self.fields.draft_vocab or self.fields.vocab)

    def draft_tokens(self) -> np.ndarray | None:
        """[V'] int32, ascending: the tokens that its head covers; None for all."""
        count, vocab = self.fields.draft_vocab, self.fields.vocab
        if count is None or vocab is None:
            return None
        found = {name: stored.read(()) for name, stored in hub_folder.tensors(self.path) if name in VOCABULARY}
        if missing := [name for name in VOCABULARY if name not in found]:
            raise UserError(
                f"{self.path}: {missing[0]} missing, but draft_vocab_size is {count} of {vocab} tokens"
            )
        # TRAP: d2t holds offsets, not tokens.
        tokens = np.arange(count) + found["d2t"] if found["d2t"].shape == (count,) else np.arange(0)
        if found["t2d"].shape != (vocab,) or not np.array_equal(np.flatnonzero(found["t2d"]), tokens):
            raise UserError(
                f"{self.path}: d2t {list(found['d2t'].shape)} and t2d {list(found['t2d'].shape)} do not name "
                f"the same {count} tokens of {vocab}, ascending; export the drafter again"
            )
        return tokens.astype(np.int32)

    def misfits(self, target: TargetConfig) -> list[str]:
        """What of the drafter does not fit a target, each with both values; empty where all does."""
        fields, found = self.fields, []
        if fields.tap_width != target.width:
            found.append(
                f"it drafts for a target of width {fields.tap_width}, and the target has width {target.width}"
            )
        # TRAP: a tap on the last layer is taken after the final norm by some engines, before it here.
        if max(fields.taps) > target.layers - 2:
            found.append(f"it taps layer {max(fields.taps)}, and the last that may be is {target.layers - 2}")
        if fields.config.mask_token >= target.vocab:
            found.append(f"its MASK is token {fields.config.mask_token}, and the last is {target.vocab - 1}")
        if fields.vocab not in (None, target.vocab):
            found.append(f"vocab_size is {fields.vocab}, and the target has {target.vocab} embedding rows")
        scale = target.embedding_scale or 1.0
        # Embeddings of its own come with the scale in them.
        if not fields.has_own_ends and not math.isclose(fields.embedding_scale, scale, rel_tol=SCALE_TOLERANCE):
            found.append(f"input_embedding_scale is {fields.embedding_scale}, and the target's is {scale}")
        if fields.softcap != target.logit_softcap:
            found.append(
                f"final_logit_softcapping is {fields.softcap}, and the target's is {target.logit_softcap}"
            )
        return found

    def _own(self, name: str, rows: int | None) -> Stored | None:
        if not self.fields.has_own_ends:
            return None
        stored = dict(hub_folder.tensors(self.path)).get(name)
        shape = (rows, self.config.width)
        if stored is None or stored.shape != shape:
            found = "none" if stored is None else list(stored.shape)
            raise UserError(
                f"{self.path}: {name}: found {found}, expected {list(shape)}; a drafter of another width than its "
                "target's (target_hidden_size) comes with an embedding and a head of its own"
            )
        return stored
