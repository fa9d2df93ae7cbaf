"""The joined decoder computes what the model computes, shares its weights and compiles once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from lazyrag.model import seam
from lazyrag.model.fused import FusedDecoder, _join
from lazyrag.model.load import LoadedModel, load_model
from tests.support.tiny import CONFIGS

TOKENS = (9, 1, 5, 7)


class Causal:
    """Plain attention that notes the layers it is asked for."""

    def __init__(self) -> None:
        self.layers: list[int] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.layers.append(layer)
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
        return out.transpose(1, 2).contiguous()


@pytest.fixture(params=CONFIGS)
def model(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> LoadedModel:
    return load_model(str(checkpoint(request.param)), device="cpu")


def passes(model: LoadedModel, decoder: FusedDecoder) -> None:
    """Compare passes of several lengths."""
    for count in TOKENS:
        ids = torch.arange(10, 10 + count)[None]
        theirs, ours = Causal(), Causal()
        with torch.inference_mode():
            expected = seam.hidden_states(model.model, ids, theirs)
            actual = decoder(ids, torch.zeros_like(ids), ours)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        assert ours.layers == theirs.layers == list(range(len(model.geometry.layers)))


def test_it_computes_what_the_model_computes(model: LoadedModel) -> None:
    passes(model, FusedDecoder(model.model))


def test_it_is_compiled_once_for_all_layers(model: LoadedModel) -> None:
    """Once for one token and once for any other count, however many layers of a kind there are."""
    torch._dynamo.reset()
    counter = CompileCounter()
    decoder = FusedDecoder(model.model)
    decoder.compile(counter)
    passes(model, decoder)
    assert counter.frame_count == 4  # the layers and the last norm
    decoder.undo_compile()
    passes(model, decoder)
    assert counter.frame_count == 4


def test_weights_are_held_once_and_stay_what_they_were(model: LoadedModel) -> None:
    before = {name: one.clone() for name, one in model.model.named_parameters()}
    first, second = FusedDecoder(model.model), FusedDecoder(model.model)
    for name, parameter in model.model.named_parameters():
        assert torch.equal(parameter, before[name])
    attention = model.model.base_model.layers[0].self_attn
    joined = [decoder._decoder.layers[0].self_attn.q_proj.weight for decoder in (first, second)]
    storages = {
        one.untyped_storage().data_ptr()
        for one in (*joined, attention.q_proj.weight, attention.k_proj.weight)
    }
    assert len(storages) == 1
    assert joined[0].shape == joined[1].shape


def test_layers_of_different_inputs_are_refused() -> None:
    module = torch.nn.Module()
    module.gate_proj, module.up_proj = torch.nn.Linear(4, 3), torch.nn.Linear(4, 2)
    plain = module.up_proj
    _join(module, ("gate_proj", "up_proj"))
    given, other = torch.randn(2, 1, 4)
    module.gate_proj(given)
    torch.testing.assert_close(module.up_proj(given), plain(given))
    module.gate_proj(given)
    with pytest.raises(AssertionError, match="different inputs"):
        module.up_proj(other)


def test_unlike_layers_stay_apart() -> None:
    module = torch.nn.Module()
    module.gate_proj, module.up_proj = torch.nn.Linear(4, 3), torch.nn.Linear(4, 2, bias=False)
    kept = module.gate_proj
    _join(module, ("gate_proj", "up_proj"))
    assert module.gate_proj is kept
