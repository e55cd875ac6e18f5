"""Weights of the slots in the objective."""

import numpy as np

# Decay constants of the published recipes by block size (arXiv:2602.06036, appendix A.3).
PUBLISHED_GAMMA = {8: 4.0, 10: 5.0, 16: 7.0}


def default_gamma(block_size: int) -> float:
    """The decay constant for a block size: published, or interpolated linearly between the published ones."""
    sizes = sorted(PUBLISHED_GAMMA)
    return float(np.interp(block_size, sizes, [PUBLISHED_GAMMA[size] for size in sizes]))


def decay_weights(block_size: int, gamma: float) -> np.ndarray:
    """[W] float32: exp(-(k - 1) / gamma) for slot k >= 1, and 0 for slot 0, which predicts nothing."""
    slot = np.arange(block_size)
    return np.where(slot == 0, 0.0, np.exp(-(slot - 1) / gamma)).astype(np.float32)
