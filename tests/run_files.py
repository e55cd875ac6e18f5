"""What a training has written, for comparison with another one."""

import json
import pathlib
from typing import Any

import jax
import numpy as np

CLOCK = {
    *("step_s", "elapsed_s", "eta_s", "drafter_tok_s", "target_tok_s", "data_wait_s", "feature_wait_s"),
    *("recalled", "prefetch_queue", "feature_queue", "checkpoint", "saving", "decode_tokens_s", "decode_ratio"),
    *("host_memory_gib", "target_memory_gib", "drafter_memory_gib", "target_mfu", "drafter_mfu"),
}


def lines(run: pathlib.Path, name: str = "train_log.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def repeatable(run: pathlib.Path, name: str = "train_log.jsonl") -> list[dict[str, Any]]:
    """A log without what a clock or a cold cache changes."""
    return [{key: value for key, value in line.items() if key not in CLOCK} for line in lines(run, name)]


def saved_arrays(run: pathlib.Path, step: int) -> list[np.ndarray]:
    """Every array of a checkpoint, restored as it was saved."""
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
        state = reader.restore(
            run.absolute() / "checkpoints" / str(step) / "state", args=ocp.args.StandardRestore()
        )
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
