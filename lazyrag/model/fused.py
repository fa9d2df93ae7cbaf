"""The decoder as a GPU runs it fastest: a twin of the model's own that shares every weight.

Linear layers that read the same input (q, k, v; gate, up) become one product, and a layer can be
compiled, once for all layers. The model itself stays as transformers made it, since ingestion and
the oracle run it as well; its parameters become views of the joined ones, so nothing is held twice.

Compiled code cannot look into a step of attention. It calls one opaque operator, which finds the
step in the thread that runs the pass.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lazyrag.model.seam import AttentionStep

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of linear layers of one module that read the same input, in the order they are called."""

STREAMED_SHARED_MEMORY = 140_000
"""Bytes that a program of our linear layers needs."""

RECOMPILE_LIMIT = 256
"""Variants of compiled code in one process."""

_running = threading.local()


class FusedDecoder:
    """The decoder layers of a model in the form a GPU runs.

    Args:
        model: a loaded checkpoint; its parameters move in memory, their values stay.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        decoder: Any = model.base_model
        shared: list[Any] = [*decoder.parameters(), *decoder.buffers(), model.config]
        self._decoder = copy.deepcopy(decoder, {id(one): one for one in shared})
        for module in list(self._decoder.modules()):
            for names in SIBLINGS:
                _join(module, names)
        for module in list(self._decoder.modules()):
            for name, child in list(module.named_children()):
                if _streams(child):
                    setattr(module, name, _Streamed(child.weight))
        for index, layer in enumerate(self._decoder.layers):
            # A number would be compiled into the code, once a layer; this one is an input.
            layer.self_attn.layer_idx = torch.tensor(index)

    def compile(self, backend: str | Callable[..., Any] = "inductor") -> None:
        """Have layers compiled at their next call; once for one token, once for any other count.

        Args:
            backend: of `torch.compile`.
        """
        for module in (*self._decoder.layers, self._decoder.norm):
            module.compile(fullgraph=True, dynamic=True, backend=backend)

    def undo_compile(self) -> None:
        """Run as transformers does again: the compiler has failed."""
        for module in (*self._decoder.layers, self._decoder.norm):
            module._compiled_call_impl = None

    def __call__(self, ids: Tensor, positions: Tensor, step: AttentionStep) -> Tensor:
        """Run the layers, see `lazyrag.model.seam.hidden_states`.

        Args:
            ids: int32 or int64 [1, tokens].
            positions: zeros, int64 [1, tokens].
            step: what attention sees; one packed sequence.

        Returns:
            [1, tokens, hidden_size], after the final norm.
        """
        # Code of all families is counted together, and each has several kinds of layers.
        with _attending(step), torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):
            output = self._decoder(
                input_ids=ids, position_ids=positions, use_cache=False, lazy=_OPAQUE
            )
        hidden: Tensor = output.last_hidden_state
        return hidden


class _Joined(nn.Module):
    """Several linear layers as one; stands in place of the first and serves the others."""

    def __init__(self, linears: list[nn.Linear]) -> None:
        super().__init__()
        self.weight = nn.Parameter(_join_parameters([one.weight for one in linears]), False)
        biases = [one.bias for one in linears if one.bias is not None]
        self.bias = nn.Parameter(_join_parameters(biases), False) if biases else None
        self.sizes = [one.out_features for one in linears]
        self.given: Tensor | None = None
        self.parts: tuple[Tensor, ...] = ()

    def forward(self, given: Tensor) -> Tensor:
        self.given = given
        self.parts = nn.functional.linear(given, self.weight, self.bias).split(self.sizes, -1)
        return self.parts[0]


class _Part(nn.Module):
    """One of the other linear layers, whose result is there already."""

    def __init__(self, joined: _Joined, index: int) -> None:
        super().__init__()
        self.joined = (joined,)  # not a child: it has a place of its own
        self.index = index
        self.last = index == len(joined.sizes) - 1

    def forward(self, given: Tensor) -> Tensor:
        (joined,) = self.joined
        assert joined.given is given, "linear layers of different inputs cannot be joined"
        part = joined.parts[self.index]
        if self.last:
            joined.given, joined.parts = None, ()
        return part


class _Streamed(nn.Module):
    """A linear layer of few outputs, whose launch depends on the number of tokens."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.arrived = torch.zeros(weight.shape[0], dtype=torch.int32, device=weight.device)

    def forward(self, given: Tensor) -> Tensor:
        result: Tensor = streamed_linear(given, self.weight, self.arrived)
        return result


def _streams(module: nn.Module) -> bool:
    """Whether a linear layer may have a launch of our own for few tokens."""
    if type(module) is not nn.Linear or module.bias is not None:
        return False
    weight = module.weight
    if type(weight.data) is not Tensor or weight.device.type != "cuda":
        return False
    from lazyrag_kernels.linear import triton as narrow

    properties = torch.cuda.get_device_properties(weight.device)
    return (
        properties.shared_memory_per_block_optin >= STREAMED_SHARED_MEMORY
        and narrow.fits(weight)
        and narrow.pays(1, weight, properties.multi_processor_count)
    )


def _join(module: nn.Module, names: tuple[str, ...]) -> None:
    linears = [getattr(module, name, None) for name in names]
    if not all(type(one) is nn.Linear for one in linears):
        return
    plain: list[nn.Linear] = [one for one in linears if isinstance(one, nn.Linear)]
    alike = {
        (one.in_features, one.weight.dtype, type(one.weight.data), one.bias is None)
        for one in plain
    }
    if len(alike) != 1:
        return
    joined = _Joined(plain)
    setattr(module, names[0], joined)
    for index, name in enumerate(names[1:], start=1):
        setattr(module, name, _Part(joined, index))


def _join_parameters(parameters: Sequence[Tensor]) -> Tensor:
    """Parameters one below the other; each becomes a view of the result."""
    first, rows = parameters[0].data, [one.shape[0] for one in parameters]
    ends = [one.data_ptr() + one.numel() * one.element_size() for one in parameters]
    if all(one.data_ptr() == end for one, end in zip(parameters[1:], ends, strict=False)) and (
        len({one.untyped_storage().data_ptr() for one in parameters}) == 1
    ):  # another twin of this model has joined them
        return first.as_strided((sum(rows), *first.shape[1:]), first.stride())
    joined = torch.cat([one.data for one in parameters])
    for parameter, view in zip(parameters, joined.split(rows), strict=True):
        parameter.data = view
    return joined


@contextmanager
def _attending(step: AttentionStep) -> Iterator[None]:
    before = getattr(_running, "step", None)
    _running.step = step
    try:
        yield
    finally:
        _running.step = before


class _Opaque:
    """Hands attention to the step of the running pass; the same object in every compiled pass."""

    def attend(self, layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `lazyrag.model.seam.AttentionStep`; ``layer`` is a tensor on the CPU."""
        result: Tensor = attend(q, k, v, layer)
        return result


_OPAQUE = _Opaque()


@torch.library.custom_op("lazyrag::attend", mutates_args=())
def attend(q: Tensor, k: Tensor, v: Tensor, layer: Tensor) -> Tensor:
    """Attention of the running pass, see `lazyrag.model.seam.AttentionStep`."""
    step: AttentionStep = _running.step
    return step.attend(int(layer), q, k, v)


@attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, layer: Tensor) -> Tensor:
    sequences, heads, tokens, dim = q.shape
    return q.new_empty(sequences, tokens, heads, dim)


@torch.library.custom_op("lazyrag::streamed_linear", mutates_args=())
def streamed_linear(x: Tensor, weight: Tensor, arrived: Tensor) -> Tensor:
    """A linear layer without bias, see `lazyrag_kernels.linear`; x is [..., inputs]."""
    from lazyrag_kernels.linear import triton as narrow

    tokens = x.numel() // x.shape[-1]
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    if not narrow.pays(tokens, weight, processors):
        return nn.functional.linear(x, weight)
    flat = x.reshape(tokens, x.shape[-1]).contiguous()
    return narrow.linear(flat, weight, arrived).view(*x.shape[:-1], weight.shape[0])


@streamed_linear.register_fake
def _(x: Tensor, weight: Tensor, arrived: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])
