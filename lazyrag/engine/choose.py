"""The next tokens of a pass: chosen where the logits are, fetched together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from lazyrag.engine.forward import Launched
from lazyrag.engine.sampling import Sampler, draw_rows


class Choice:
    """What `Sampler.next` would choose of each row of a pass.

    Answers that take the likeliest token, and those that draw with the same options, are chosen on
    the device, before a later pass is launched, which may take them from there; they cost one copy
    to the host together. Those under a constraint or a repetition penalty are chosen one by one
    when they are fetched.

    Args:
        launched: the last pass.
        samplers: one a row of its logits; None = nothing is to be chosen of this row.
    """

    def __init__(self, launched: Launched, samplers: Sequence[Sampler | None]) -> None:
        self._launched = launched
        self._samplers = samplers
        groups: dict[Hashable, list[int]] = {}
        for row, sampler in enumerate(samplers):
            if sampler is not None and sampler.kind is not None and sampler.warpers:
                groups.setdefault(sampler.kind, []).append(row)
        for rows in groups.values():
            self._draw(rows)

    def _draw(self, rows: Sequence[int]) -> None:
        """Of samplers of one kind."""
        samplers = [sampler for row in rows if (sampler := self._samplers[row]) is not None]
        logits = self._launched.logits
        uniform = torch.tensor([sampler.uniform() for sampler in samplers], dtype=torch.float64)
        where = torch.tensor(rows)
        if logits.device.type == "cuda":  # a copy from ordinary memory would wait for the pass
            uniform = uniform.pin_memory().to(logits.device, non_blocking=True)
            where = where.pin_memory().to(logits.device, non_blocking=True)
        scores = logits.index_select(0, where)
        self._launched.choose(rows, draw_rows(scores, samplers[0].warpers, uniform))

    @property
    def on_device(self) -> bool:
        """Whether everything is chosen there: the next pass may be launched before `fetch`."""
        return all(sampler is None or sampler.kind is not None for sampler in self._samplers)

    @property
    def done(self) -> bool:
        """Whether `fetch` waits for nothing."""
        return self._launched.done

    def fetch(self) -> list[int | Exception | None]:
        """An id a row, or what went wrong with that row alone; waits for the pass."""
        outcomes: list[int | Exception | None] = []
        for row, (sampler, id, top) in enumerate(
            zip(self._samplers, *self._launched.fetch(), strict=True)
        ):
            if sampler is None:
                outcomes.append(None)
                continue
            try:
                if sampler.kind is None:
                    outcomes.append(sampler.next(self._launched.logits[row]))
                else:
                    outcomes.append(sampler.accept(id, top))
            except Exception as error:
                outcomes.append(error)
        return outcomes
