"""Model FLOPs of training: what the target's forward and the drafter's forward and backward have to multiply.

    y = W x                a token: 2 |W|, and of a stack of experts only the share that the token chooses
    softmax(q k^T) v       a pair of query and key: 4 N H
    delta rule             a token and value head: 6 Dk Dv, for k S, q S and k (x) d of the recurrence
    backward               a product as large as the forward's for each factor that a gradient goes to

A multiply-add is two operations. Matrix products, convolutions and attention count; norms, activations, rotations,
softmax, embedding rows, losses and the optimizer do not. Nor does work that only an implementation adds: products
repeated in the backward pass, the hidden half of a causal row, what the chunked delta rule spends on top.
Padding counts, as it is computed: all S tokens of all rows, and all A * W slots of a row.
"""

import functools

from flax import nnx

from dflash_jax.models.decoder import LINEAR, SLIDING, DecoderConfig, DecoderLayer
from dflash_jax.models.drafter import Drafter, DrafterConfig

# Dense bf16 FLOP/s of one jax device by its whole `device_kind`, as the makers state them; a slice of a GPU has a
# longer name, and no peak here. Where float32 is computed, bf16 remains the reference.
PEAKS = {
    # Google Cloud, "TPU v4", "TPU v5e", "TPU v5p", "TPU v6e": peak compute per chip (bf16); a device is a chip.
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    # NVIDIA A100 Tensor Core GPU datasheet: BF16 Tensor Core, without sparsity.
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    # NVIDIA H100, H200 and GH200 datasheets: half of BF16 Tensor Core, which is stated with sparsity.
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835.5e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H200 NVL": 835.5e12,
    "NVIDIA GH200 480GB": 989e12,
    # NVIDIA HGX B200 and GB200 NVL72 datasheets: the system's FP16/BF16 over its GPUs, half of it as above.
    "NVIDIA B200": 2250e12,
    "NVIDIA GB200": 2500e12,
    # NVIDIA L4 and L40S datasheets: BF16 Tensor Core, without sparsity.
    "NVIDIA L4": 121e12,
    "NVIDIA L40S": 362e12,
    # NVIDIA GA102, Ada and RTX Blackwell architecture whitepapers: BF16 Tensor with FP32 accumulate, dense.
    "NVIDIA GeForce RTX 3090": 71e12,
    "NVIDIA RTX A6000": 154.8e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "NVIDIA GeForce RTX 5090": 209.5e12,
}


def peak_flops(device_kind: str) -> float | None:
    """Dense bf16 FLOP/s of one device of this kind, None where it is not known (a CPU, a slice of a GPU)."""
    return PEAKS.get(device_kind)


def target_flops(config: DecoderConfig, *, rows: int, length: int, last_tap: int | None) -> float:
    """FLOPs of one forward of the target over [rows, length] tokens, as far as layer `last_tap`, without the head.

    last_tap: 0-based, the last layer that runs; None: all of them, as where the last states are wanted.
    A row counts as one document: the token at position i sees i + 1 keys, or as many as its window holds.
    """
    layers = config.layers if last_tap is None else last_tap + 1
    total = 0
    for kind, weights in zip(config.layer_types[:layers], _layer_weights(config), strict=False):
        total += 2 * length * weights
        if kind == LINEAR:
            assert config.delta is not None
            total += 6 * length * config.delta.values * config.delta.key_width
        else:
            pairs = _seen_pairs(length, config.window if kind == SLIDING else None)
            total += 4 * config.heads * config.head_width * pairs
    return float(rows * total)


def drafter_flops(
    config: DrafterConfig, *, rows: int, length: int, anchors: int, head_rows: int, teacher: bool = False
) -> float:
    """FLOPs of the forward and backward of one batch of [rows, length] tokens with `anchors` blocks a row.

    head_rows: rows of the frozen head that the loss looks at, sampled or all of them; teacher: the target's last
    states go through that head too. Slot 0 of a block does not reach the head. A slot counts as seeing the whole
    row and its whole block: what it does see depends on the anchors drawn, and all of it is computed.
    The frozen head receives no gradient, nor do the features and the embedded block.
    """
    tokens, slots = rows * length, rows * anchors * config.block_size
    multiplied = {"fc": tokens, "k_proj": tokens + slots, "v_proj": tokens + slots}
    products = 0
    for name, weights in _drafter_weights(config).items():
        # Forward and the weights' gradient, and the input's where anything is trained before it.
        factor = 2 if name in ("fc", "embed_proj") else 3
        products += factor * weights * multiplied.get(name, slots)
    pairs = slots * (length + config.block_size) * len(config.layer_types)
    products += 3 * 2 * config.heads * config.head_width * pairs
    predicted = rows * anchors * (config.block_size - 1)
    products += (3 if teacher else 2) * head_rows * config.target_width * predicted
    return float(2 * products)


@functools.cache
def _layer_weights(config: DecoderConfig) -> tuple[int, ...]:
    """How many weights a token is multiplied with, by layer."""

    def count(index: int) -> int:
        layer = nnx.eval_shape(lambda: DecoderLayer(config, index, nnx.Rngs(0)))
        return sum(_used(weight, config) for _, weight in nnx.to_flat_state(nnx.state(layer, nnx.Param)))

    kinds = [(kind, index in config.dense_layers) for index, kind in enumerate(config.layer_types)]
    counts = {kind: count(kinds.index(kind)) for kind in set(kinds)}
    return tuple(counts[kind] for kind in kinds)


def _used(weight: nnx.Variable, config: DecoderConfig) -> int:
    """Weights of one parameter that a token is multiplied with; vectors only scale or shift."""
    if len(weight.shape) < 2:
        return 0
    if config.experts is not None and weight.get_metadata()["axes"][0] == "experts":
        return weight.size // config.experts.experts * config.experts.chosen
    return weight.size


@functools.cache
def _drafter_weights(config: DrafterConfig) -> dict[str, int]:
    """Sizes of all matrices of the same name together, such as those called q_proj."""
    drafter = nnx.eval_shape(lambda: Drafter(config, nnx.Rngs(0)))
    sizes: dict[str, int] = {}
    for path, weight in nnx.to_flat_state(nnx.state(drafter, nnx.Param)):
        if len(weight.shape) == 2:
            name = str(path[-2])
            sizes[name] = sizes.get(name, 0) + weight.size
    return sizes


def _seen_pairs(length: int, window: int | None) -> int:
    """Pairs of a query and a key that it sees in a causal row; window: keys that a query sees, itself included."""
    reach = length if window is None else min(window, length)
    return reach * (reach + 1) // 2 + (length - reach) * reach
