"""Seeing which nodes a question attends to, before it is decided how its prompt is read."""

from __future__ import annotations

from collections.abc import Collection

from lazyrag.engine.answer import Task
from lazyrag.engine.generation import Deliver, Looked, Outcome
from lazyrag.engine.metrics import Metrics
from lazyrag.engine.request import Request
from lazyrag.engine.runner import Runner
from lazyrag.prompt.segments import PlacedPrompt


class Looking(Task):
    """Brings the nodes of a prompt and reads its live text up to the last layer that is measured.

    One pass of its own; no request of a user, so that no metric counts it.

    Args:
        request: of the nodes alone.
        prompt: with `MAX_ROWS` live tokens at most, over these nodes.
        layers: whose attention is measured.
        runner: holds the nodes.
        deliver: where the `Looked` goes.
        metrics: of the engine.
    """

    def __init__(
        self,
        request: Request,
        prompt: PlacedPrompt,
        layers: Collection[int],
        runner: Runner,
        deliver: Deliver,
        metrics: Metrics,
    ) -> None:
        super().__init__(request, deliver, metrics)
        self._prompt = prompt
        self._layers = layers
        self._runner = runner

    def begin(self) -> Outcome | None:
        """See `Task`."""
        assert self.started is not None, "it has its pages"
        self.begun = True
        return Looked(self._runner.look(self.started, self._prompt, self._layers))

    def conclude(self, outcome: Outcome | BaseException) -> None:
        """See `Task`."""
        self._deliver(outcome)
