"""TensorBoard's record of what was measured after a training, beside that of the training itself."""

import pathlib
from collections.abc import Mapping

import tensorboardX


def record(directory: pathlib.Path, step: int, values: Mapping[str, float], *, name: str) -> None:
    """Add a point at `step` to each tag of `values`, in the tensorboard/ folder of a run; name: who measured."""
    board = tensorboardX.SummaryWriter(str(directory / "tensorboard"), filename_suffix=f".{name}")
    for tag, value in values.items():
        board.add_scalar(tag, value, step)
    board.close()
