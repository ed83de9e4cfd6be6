"""Weights to continue from: those of a GGUF that this program wrote."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize

from lab.train.errors import TrainError
from lab.train.model.export import ARCHITECTURE
from lab.train.model.network import EMBEDDING, NetworkShape, Weights


class PretrainedModel:
    """A network that `export` wrote, for a run that starts from its weights. Raises TrainError for
    any other file."""

    def __init__(self, path: Path) -> None:
        try:
            reader = GGUFReader(path)
            keys = {
                key: reader.fields[key].contents() for key in reader.fields if "tokens" not in key
            }
            values = {t.name: dequantize(t.data, t.tensor_type) for t in reader.tensors}
            self.shape = _shape(keys, values)
        except (OSError, ValueError, KeyError, NotImplementedError) as error:
            raise TrainError(f"{path} is not a model to continue from: {error}.") from error
        sizes = {name: tuple(value.shape) for name, value in values.items()}
        if sizes != self.shape.tensors():
            raise TrainError(f"{path} is not a model of this program: it has other tensors.")
        self._values = values

    def weights(self, shape: NetworkShape, _seed: int) -> Weights:
        """Its weights as float32, in the order of `shape.tensors()`. The context and the RoPE base
        may differ: no tensor depends on them."""
        same = replace(shape, n_ctx=self.shape.n_ctx, rope_freq_base=self.shape.rope_freq_base)
        assert same == self.shape
        return {
            name: torch.from_numpy(np.array(self._values[name], np.float32)).requires_grad_()
            for name in shape.tensors()
        }


def _shape(keys: Mapping[str, Any], values: Mapping[str, np.ndarray[Any, Any]]) -> NetworkShape:
    def of(name: str) -> Any:
        return keys[f"{ARCHITECTURE}.{name}"]

    return NetworkShape(
        n_vocab=len(values[EMBEDDING]),
        n_embd=of("embedding_length"),
        n_layer=of("block_count"),
        n_head=of("attention.head_count"),
        n_ff=of("feed_forward_length"),
        n_ctx=of("context_length"),
        rope_freq_base=of("rope.freq_base"),
        norm_eps=of("attention.layer_norm_rms_epsilon"),
    )
