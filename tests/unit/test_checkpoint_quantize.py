"""Q8_0, as the ``gguf`` package writes it."""

import gguf
import numpy as np
import pytest
import torch

from deepinfer_core.checkpoint.dequantize import dequantize
from deepinfer_core.checkpoint.quantize import quantize_q8_0


def test_packed_weights_are_as_close_as_those_of_the_package() -> None:
    weight = torch.randn(33, 160, generator=torch.Generator().manual_seed(1))
    weight[3] = 0.0
    weight[5] *= 1e-4
    packed = quantize_q8_0(weight)
    theirs = gguf.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q8_0)
    assert packed.shape == (33, 160)
    assert packed.data.shape == theirs.shape
    found = dequantize(packed.data, packed.format, packed.shape).float()
    other = torch.from_numpy(gguf.dequantize(theirs, gguf.GGMLQuantizationType.Q8_0))
    error, their_error = ((x - weight).abs().amax(1) for x in (found, other))
    assert torch.all(error <= their_error * 1.01 + 1e-7)
    assert torch.equal(found[3], torch.zeros(160))
    # The scales are the same; numbers may differ where a scale was rounded.
    scales = packed.data.numpy().reshape(33, -1, 34)[..., :2]
    assert np.array_equal(scales, theirs.reshape(33, -1, 34)[..., :2])


def test_other_columns_are_refused() -> None:
    with pytest.raises(ValueError, match="a multiple of 32 columns, not 40"):
        quantize_q8_0(torch.zeros(2, 40))
