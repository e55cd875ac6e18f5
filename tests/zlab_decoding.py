"""z-lab's own decoding loop in PyTorch, of PyPI `dflash`, played beside ours."""

import time
from typing import Any

import numpy as np
import pytest

from dflash_jax.decode.speculate import Decoded


def accepted_by_zlab(theirs: Any, model: Any, ours: Decoded, prompts: np.ndarray, *, new: int) -> list[int]:
    """Tokens of each verify round of their loop, once it is seen to give the text and the rounds of ours.

    theirs, model: drafter and target in PyTorch; prompts: [B, P] tokens, which `ours` continues by `new` tokens.
    """
    import torch
    from dflash import model as published

    rounds = []
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(published, "_cuda_time", time.perf_counter)
        for row, prompt in enumerate(prompts):
            # Their last blocks are shorter than a block; asked for more tokens, none within `new` is.
            found = published.dflash_generate(
                theirs,
                model,
                torch.tensor(prompt[None].astype(np.int64)),
                max_new_tokens=new + theirs.block_size,
                stop_token_ids=None,
                return_stats=True,
            )
            whole = len(prompt) + new
            assert found.output_ids[0, :whole].tolist() == ours.rows.tokens[row, :whole].tolist()
            emitted = np.diff(np.minimum(np.cumsum(found.acceptance_lengths), new - 1), prepend=0)
            emitted = emitted[emitted > 0]
            assert emitted.tolist() == ours.emitted[row, : len(emitted)].tolist()
            assert not ours.emitted[row, len(emitted) :].any()
            rounds += emitted.tolist()
    return rounds
