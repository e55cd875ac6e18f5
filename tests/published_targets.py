"""Folders of small published-style targets, written from the rule of their random weights (tests/golden/targets).

Each has the hidden states, logits and greedy tokens that transformers 5.15 gave for those weights in float32. A
weight is mean + gain * noise, the noise a stream named by seed and tensor; a matrix's gain is divided by the root
of its last dimension. Experts are drawn stacked, as transformers holds them, and stored one by one.
"""

import json
import pathlib
import re
import zlib
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

TARGETS = pathlib.Path(__file__).parent / "golden" / "targets"
NAMES = tuple(sorted(path.name for path in TARGETS.iterdir()))
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
EXPERTS = 8


def write_target(path: pathlib.Path, name: str, *, spelling: str = "config.json") -> pathlib.Path:
    """Write the folder of target `name` with one of its spellings of config.json."""
    rule = json.loads((TARGETS / name / "weights.json").read_text())
    path.mkdir()
    (path / "config.json").write_text((TARGETS / name / spelling).read_text())
    index = {}
    for file, tensors in rule["files"].items():
        arrays = {tensor: _tensor(tensor, said, rule["seed"]) for tensor, said in tensors.items()}
        if rule["dtype"] == "bfloat16":
            arrays = {tensor: array.astype(ml_dtypes.bfloat16) for tensor, array in arrays.items()}
        save_file(arrays, path / file)
        index |= dict.fromkeys(arrays, file)
    if len(rule["files"]) > 1:
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return path


def reference(name: str) -> dict[str, np.ndarray]:
    """What transformers computed: input_ids, attention_mask, hidden_states, logits, greedy_ids .."""
    return dict(np.load(TARGETS / name / "ref.npz"))


def _tensor(name: str, said: dict[str, Any], seed: int) -> np.ndarray:
    if "values" in said:
        return np.asarray(said["values"], np.float32)
    shape = tuple(said["shape"])
    gain = said["gain"] if len(shape) == 1 else said["gain"] / np.sqrt(shape[-1])
    return np.ascontiguousarray(np.float32(said["mean"]) + _noise(name, shape, seed) * np.float32(gain))


def _noise(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    def stream(name: str, shape: tuple[int, ...]) -> np.ndarray:
        return np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape).astype(np.float32)

    expert = EXPERT.fullmatch(name)
    if expert is None:
        return stream(name.replace("model.language_model.", "model."), shape)
    if expert[3] == "down":
        return stream(f"{expert[1]}.down_proj", (EXPERTS, *shape))[int(expert[2])]
    both = stream(f"{expert[1]}.gate_up_proj", (EXPERTS, 2 * shape[0], shape[1]))[int(expert[2])]
    return both[: shape[0]] if expert[3] == "gate" else both[shape[0] :]
