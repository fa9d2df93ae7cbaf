"""Seeing which nodes a question attends to, before it is decided how its prompt is read."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import replace

from lazyrag.engine.answer import Task
from lazyrag.engine.generation import Deliver, Looked, Outcome
from lazyrag.engine.metrics import Metrics
from lazyrag.engine.request import Request
from lazyrag.engine.runner import Runner
from lazyrag.prompt.segments import PlacedPrompt, place


class Looking(Task):
    """Brings the nodes of a prompt and reads its live text up to the last layer that is measured.

    One pass of its own. It says nothing to the reader but what was seen, and no metric counts it.

    Args:
        request: whose nodes, time limit and priority; of it no answer is made.
        prompt: with `MAX_ROWS` live tokens at most.
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
        nodes = place([node.run for node in prompt.nodes])
        super().__init__(replace(request, prompt=nodes, new_tokens=0), deliver, metrics)
        self._prompt = prompt
        self._layers = layers
        self._runner = runner

    def begin(self) -> Outcome | None:
        """See `Task`."""
        assert self.started is not None, "it has its pages"
        self.begun = True
        masses = self._runner.look(self.started, self._prompt, self._layers)
        return Looked(masses, self.started.origins)

    def conclude(self, outcome: Outcome | BaseException) -> None:
        """See `Task`."""
        self._deliver(outcome)


class Climbing(Looking):
    """Looks, then puts the request in line as its rung has it: one request to its reader.

    What follows has the time limit, the priority and the place in line of this one, and is
    cancelled with it.

    Args:
        request: with a `Climb`.
        runner: holds the nodes.
        deliver: where the outcome goes when it comes to nothing.
        metrics: of the engine.
        follow: makes the task of a request.
        put: puts it in line.
    """

    def __init__(
        self,
        request: Request,
        runner: Runner,
        deliver: Deliver,
        metrics: Metrics,
        follow: Callable[[Request], Task],
        put: Callable[[Task], object],
    ) -> None:
        assert request.climb is not None, "it has something to look at"
        self._cancelled = False
        self._following: Task | None = None
        climb = request.climb
        super().__init__(request, climb.prompt, climb.layers, runner, deliver, metrics)
        self._given = request
        self._climb = climb
        self._follow = follow
        self._put = put

    @property
    def cancelled(self) -> bool:
        """See `Task`."""
        return self._cancelled

    @cancelled.setter
    def cancelled(self, value: bool) -> None:
        self._cancelled = value
        if self._following is not None:
            self._following.cancelled = value

    def conclude(self, outcome: Outcome | BaseException) -> None:
        """See `Task`; with what was seen the request goes on."""
        if isinstance(outcome, Looked):
            try:
                self._go_on(outcome)
                return
            except Exception as error:
                outcome = error
        Task.conclude(self, outcome)

    def _go_on(self, seen: Looked) -> None:
        climbed = self._runner.climbed(self._given, self._climb, seen.masses)
        look_s = time.perf_counter() - self._submitted
        following = self._follow(replace(climbed, look_s=look_s, origins=seen.origins))
        following.arrival = self.arrival
        self._following = following  # from here on cancelling reaches it
        following.cancelled = self._cancelled
        self._put(following)
