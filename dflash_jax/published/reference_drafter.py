"""A second reader of drafter folders, in plain numpy, which shares no code with the first.

It follows from the definition of DFlash's inference, reads config.json as it lies there, and computes the states
of one block in float32:

    c_t = rms(W_fc f_t)                                    context, one vector per token, positions p_t < a
    x   = embedded [x_a, MASK .. MASK]                     slot k is at position a + k
    x  += attention(rms(x); keys and values of c and x);   x += mlp(rms(x))        in every layer
    y   = rms(x)
"""

import json
import math
import pathlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import safetensors


class ReferenceDrafter:
    """The drafter of a folder in either format."""

    def __init__(self, folder: pathlib.Path):
        top: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.is_speculators = "speculators_model_type" in top
        self.top, self.layers = top, top.get("transformer_layer_config", top)
        self.dflash: dict[str, Any] = top.get("dflash_config", {})
        self.file = safetensors.safe_open(folder / "model.safetensors", framework="numpy")

    def expected_shapes(self) -> dict[str, list[int]]:
        """The shape of every tensor that the configuration asks for."""
        c = self.layers
        width, inner, head = c["hidden_size"], c["intermediate_size"], c["head_dim"]
        queries, keys = head * c["num_attention_heads"], head * c["num_key_value_heads"]
        taps = len(
            self.top["aux_hidden_state_layer_ids"] if self.is_speculators else self.dflash["target_layer_ids"]
        )
        target_width = self.top.get("target_hidden_size")
        rows = self.top["draft_vocab_size"] if self.is_speculators else c["vocab_size"]
        shapes = {
            "fc.weight": [width, taps * (target_width or width)],
            "hidden_norm.weight": [width],
            "norm.weight": [width],
        }
        for layer in range(c["num_hidden_layers"]):
            shapes |= {
                f"layers.{layer}.input_layernorm.weight": [width],
                f"layers.{layer}.post_attention_layernorm.weight": [width],
                f"layers.{layer}.self_attn.q_proj.weight": [queries, width],
                f"layers.{layer}.self_attn.k_proj.weight": [keys, width],
                f"layers.{layer}.self_attn.v_proj.weight": [keys, width],
                f"layers.{layer}.self_attn.o_proj.weight": [width, queries],
                f"layers.{layer}.self_attn.q_norm.weight": [head],
                f"layers.{layer}.self_attn.k_norm.weight": [head],
                f"layers.{layer}.mlp.gate_proj.weight": [inner, width],
                f"layers.{layer}.mlp.up_proj.weight": [inner, width],
                f"layers.{layer}.mlp.down_proj.weight": [width, inner],
            }
        if target_width:
            shapes["embed_tokens.weight"] = [c["vocab_size"], width]
        if target_width or rows != c["vocab_size"]:
            shapes["lm_head.weight"] = [rows, width]
        if rows != c["vocab_size"]:
            shapes |= {"d2t": [rows], "t2d": [c["vocab_size"]]}
        return shapes

    def found_shapes(self) -> dict[str, list[int]]:
        """The shape of every tensor in the file."""
        return {name: list(self.file.get_slice(name).get_shape()) for name in self.file.keys()}  # noqa: SIM118

    def tensor(self, name: str) -> np.ndarray:
        """A tensor as float32."""
        return self.file.get_tensor(name).astype(np.float32)

    def rows(self, name: str, indices: Iterable[int]) -> np.ndarray:
        """Some rows of a tensor as float32."""
        stored = self.file.get_slice(name)
        return np.concatenate([stored[int(index) : int(index) + 1] for index in indices]).astype(np.float32)

    def times(self, states: np.ndarray, name: str) -> np.ndarray:
        """[W, V]: the states [W, D] by a tensor [V, D], of which little is in memory at a time."""
        stored, found = self.file.get_slice(name), []
        count, step = stored.get_shape()[0], 2**14
        for start in range(0, count, step):
            found.append(states @ stored[start : min(start + step, count)].astype(np.float32).T)
        return np.concatenate(found, axis=-1)

    def block_input(self) -> tuple[int, int]:
        """Slots of a block, and the token of MASK."""
        place = self.top if self.is_speculators else self.dflash
        return place["block_size"], place["mask_token_id"]

    def states(
        self, features: np.ndarray, positions: np.ndarray, embedded: np.ndarray, *, anchor: int
    ) -> np.ndarray:
        """[W, D] after the final norm, of a block [W, D] at position `anchor` behind features [S, T * E]."""
        context = self._norm(features @ self.tensor("fc.weight").T, "hidden_norm")
        slots = anchor + np.arange(len(embedded))
        x = embedded.astype(np.float32)
        for layer in range(self.layers["num_hidden_layers"]):
            prefix = f"layers.{layer}"
            visible = self._visible(layer, positions, slots)
            x = x + self._attention(
                prefix, self._norm(x, f"{prefix}.input_layernorm"), context, np.append(positions, slots), visible
            )
            y = self._norm(x, f"{prefix}.post_attention_layernorm")
            gate = y @ self.tensor(f"{prefix}.mlp.gate_proj.weight").T
            up = y @ self.tensor(f"{prefix}.mlp.up_proj.weight").T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ self.tensor(f"{prefix}.mlp.down_proj.weight").T
        return self._norm(x, "norm")

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        scale = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.layers["rms_norm_eps"])
        return x / scale * self.tensor(f"{name}.weight")

    def _attention(
        self, prefix: str, x: np.ndarray, context: np.ndarray, positions: np.ndarray, visible: np.ndarray
    ) -> np.ndarray:
        """[W, D] of normed slots x [W, D], which see what of context and slots is visible [W, S + W]."""
        c, count = self.layers, len(x)
        sources = np.concatenate([context, x])

        def heads(y: np.ndarray, kind: str) -> np.ndarray:
            return (y @ self.tensor(f"{prefix}.self_attn.{kind}_proj.weight").T).reshape(len(y), -1, c["head_dim"])

        queries = self._rotated(self._norm(heads(x, "q"), f"{prefix}.self_attn.q_norm"), positions[-count:])
        keys = self._rotated(self._norm(heads(sources, "k"), f"{prefix}.self_attn.k_norm"), positions)
        shared = c["num_attention_heads"] // c["num_key_value_heads"]
        keys, values = (np.repeat(y, shared, axis=1) for y in (keys, heads(sources, "v")))
        scores = np.einsum("qnh,snh->nqs", queries, keys) / math.sqrt(c["head_dim"])
        scores = np.where(visible, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights = weights / weights.sum(axis=-1, keepdims=True)
        mixed = np.einsum("nqs,snh->qnh", weights, values).reshape(count, -1)
        return mixed @ self.tensor(f"{prefix}.self_attn.o_proj.weight").T

    def _visible(self, layer: int, positions: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """[W, S + W]: which keys each slot sees."""
        sliding = self.layers["layer_types"][layer] == "sliding_attention"
        if self.is_speculators:
            causal = sliding and not self.top["sliding_window_non_causal"]
        else:
            causal = self.top.get("is_causal", sliding)
        distance = slots[:, None] - np.append(positions, slots)
        visible = distance >= 0 if causal else np.ones(distance.shape, bool)
        return visible & (abs(distance) < self.layers["sliding_window"]) if sliding else visible

    def _rotated(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Heads x [S, N, H] turned to their positions [S]; channel i goes with channel i + H / 2."""
        frequencies, factor = self._frequencies()
        angles = (positions[:, None] * frequencies)[:, None, :]
        cosines, sines = np.cos(angles) * factor, np.sin(angles) * factor
        first, second = np.split(x, 2, axis=-1)
        turned = [first * cosines - second * sines, second * cosines + first * sines]
        return np.concatenate(turned, axis=-1).astype(np.float32)

    def _frequencies(self) -> tuple[np.ndarray, float]:
        """[H / 2] radians by position of every pair of channels, and the factor of sines and cosines."""
        rope, width = self.layers["rope_parameters"], self.layers["head_dim"]
        pairs = np.arange(width // 2)
        plain = rope["rope_theta"] ** (-2 * pairs / width)
        if rope["rope_type"] == "default":
            return plain, 1.0
        # YaRN: pairs that turn often over the original length stay, those that turn seldom are slowed down.
        turns = [rope["beta_fast"], rope["beta_slow"]]
        length = rope["original_max_position_embeddings"]
        low, high = (
            width * math.log(length / (2 * math.pi * times)) / (2 * math.log(rope["rope_theta"]))
            for times in turns
        )
        if rope["truncate"]:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        slowed = np.clip((pairs - low) / (high - low or 0.001), 0, 1)
        return plain * (1 - slowed) + plain / rope["factor"] * slowed, rope["attention_factor"]
