"""The processes of one program that share a model: tensor parallelism under ``torchrun``.

Rank 0 leads: it alone decides what is computed, and tells the others in messages of plain values
(JSON, no pickle). What follows a message is done by all ranks in the same order, with collectives
over heads and inside the model's layers. What fails there ends the group: a rank that has left the
common order cannot be brought back.

    model and heads   NCCL on GPUs, gloo on the CPU; an operation has `ANSWER_S`
    messages          gloo, from rank 0; the others wait for the next one as long as it takes
    watching          gloo, to rank 0; ends when a rank closes, breaks when its process dies
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from transformers import PreTrainedModel

from lazyrag.errors import LazyRagError, ModelError

LOAD_S = 3600.0
"""Seconds that one rank waits for the others while weights are fetched and read."""
ANSWER_S = 120.0
"""Seconds that one operation of all ranks may take once the engine serves."""
BLAME_S = 3.0
"""Seconds in which a rank that died is found out."""
HEAD_BYTES = 4096
"""Of a message that is sent in one piece with its length."""

COMMAND = "torchrun --nproc-per-node N program.py"
_ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_FOREVER = timedelta(days=3650)

Message = dict[str, Any]
"""Plain values: what JSON can say."""

logger = logging.getLogger("lazyrag")


class Ranks:
    """One process of the group, as `join` finds it.

    Attributes:
        rank: of this process, from 0.
        count: of processes, at least 2.
        in_step: whether the model may run now: all ranks do the same. On rank 0 False but for
            `together`, once `serve` was called.
    """

    _joined = False  # a process does so once: the others do not come back

    def __init__(self, device: torch.device, owned: bool) -> None:
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self.in_step = True
        self._device = device
        self._owned = owned
        self._messages = dist.new_group(backend="gloo", timeout=_FOREVER)
        self._watching = dist.new_group(backend="gloo", timeout=_FOREVER)
        self._failure: str | None = None
        self._serving = self._closed = False
        self._lock = threading.RLock()
        self._watchers: list[threading.Thread] = []
        self._pid = os.getpid()

    @classmethod
    def join(cls, device: torch.device) -> Ranks | None:
        """The group that ``torchrun`` has started; None when it consists of this process alone.

        Args:
            device: ``cuda`` or ``cpu``, without a number; torchrun's local rank is the number.

        Raises:
            ModelError: torchrun did not start this process, the group was closed before, the device
                has a number or is not the one that transformers would take, or ranks do not meet.
        """
        if cls._joined:
            raise ModelError(
                "a program opens one engine with tensor_parallel=True, and not another one when "
                "that is closed: the other ranks serve the first one, and end with it."
            )
        if not all(name in os.environ for name in _ENVIRONMENT):
            raise ModelError(
                "tensor_parallel=True needs several processes: start the program with "
                f"'{COMMAND}', N being the number of GPUs."
            )
        begun, count = dist.is_initialized(), int(os.environ["WORLD_SIZE"])
        if count == 1:
            return None
        expected = "cuda" if torch.cuda.is_available() else "cpu"
        if device.index is not None or device.type != expected:
            raise ModelError(
                f"device {str(device)!r} cannot be chosen with tensor_parallel=True: each rank "
                f"takes the GPU of its local rank, or the CPU where there is none ({expected!r} "
                "here). Leave the device out; CUDA_VISIBLE_DEVICES says which GPUs there are."
            )
        local = int(os.environ["LOCAL_RANK"])
        if device.type == "cuda" and local >= torch.cuda.device_count():
            raise ModelError(
                f"there is no GPU for rank {os.environ['RANK']}: start one process for each of the "
                f"{torch.cuda.device_count()} GPUs, not {count}."
            )
        try:
            if device.type == "cuda":
                device = torch.device("cuda", local)
                torch.cuda.set_device(device)
            if not begun:
                dist.init_process_group(
                    "nccl" if device.type == "cuda" else "gloo",
                    timeout=timedelta(seconds=LOAD_S),
                )
            cls._joined = True
            return cls(device, not begun)
        except (RuntimeError, ValueError) as error:
            raise ModelError(f"the {count} ranks did not meet: {_first_line(error)}") from error

    @property
    def _forked(self) -> bool:
        """Whether this is not the process that joined: what talks to the others stayed there."""
        return self._pid != os.getpid()

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    # while the model is loaded: all ranks run the same code

    def share(self, message: Message | None) -> Message:
        """What rank 0 says, on every rank; the others give None."""
        if self.leads:
            assert message is not None, "rank 0 has something to say"
            self._tell(message)
            return message
        return self.hear()

    def ready(self, model: PreTrainedModel) -> None:
        """The model is loaded: operations have `ANSWER_S` from now on, and the layers refuse to run
        where the other ranks would not run them as well.
        """
        mesh: Any = model._device_mesh
        for group in (dist.group.WORLD, *mesh.get_all_groups()):
            distributed_c10d._set_pg_timeout(timedelta(seconds=ANSWER_S), group)

        def check(*_: object) -> None:
            if not self.in_step:
                raise LazyRagError(
                    "a model that several ranks share runs through its engine only; this use of "
                    "it is not possible with tensor_parallel=True."
                )

        model.base_model.register_forward_pre_hook(check)

    # rank 0, while the engine serves

    def serve(self) -> None:
        """From here on the others wait for messages; rank 0 notices when one dies."""
        self.in_step, self._serving = False, True
        atexit.register(self.close)
        for rank in range(1, self.count):
            name = f"lazyrag-rank-{rank}"
            watcher = threading.Thread(target=self._watch, args=(rank,), name=name, daemon=True)
            watcher.start()
            self._watchers.append(watcher)

    @contextmanager
    def together(self, message: Message) -> Iterator[None]:
        """Rank 0 sends a message and does its own part of what it asks for.

        Raises:
            LazyRagError: the group has failed, now or before; names the rank if one has died.
        """
        self.check()  # a forked process has a lock that nobody may ever release
        with self._lock:
            self.check()
            self.in_step = True
            try:
                self._tell(message)
                yield
            except BaseException as error:
                raise self._failed(error) from error
            finally:
                self.in_step = False

    def check(self) -> None:
        """Refuse to go on with a group that has failed, was closed, or is another process's.

        Raises:
            LazyRagError: says which rank, where that is known.
        """
        if self._forked:
            raise LazyRagError(
                "this process was forked from one that shares its model with other ranks: it is "
                "none of them. Ask in the process that opened the engine."
            )
        if self._failure is not None:
            raise LazyRagError(f"{self._failure} Start the program again.")
        if self._closed:
            raise LazyRagError("this engine is closed, and its ranks have left.")

    def close(self) -> None:
        """Leave the group; rank 0 lets the others go. Safe to call more than once, and from a
        forked process, which has left nothing.
        """
        if self._forked:
            return
        if not self._lock.acquire(timeout=BLAME_S):  # a pass that never ends
            self._failure = self._failure or f"A pass over {self.count} ranks did not end."
            return
        try:
            if self._closed:
                return
            self._closed = True
            atexit.unregister(self.close)
            if self._serving and self._failure is None:
                with suppress(RuntimeError):  # they are gone already
                    self._tell({"do": "close"})
                for watcher in self._watchers:
                    watcher.join(BLAME_S)
            self._leave()
        finally:
            self._lock.release()

    # the other ranks

    def hear(self) -> Message:
        """The next message of rank 0, whenever it comes.

        Raises:
            LazyRagError: rank 0 has ended.
        """
        try:
            return self._hear()
        except RuntimeError as error:
            raise LazyRagError("rank 0 has ended: see what it printed.") from error

    def _hear(self) -> Message:
        head = torch.empty(HEAD_BYTES, dtype=torch.uint8)
        dist.broadcast(head, 0, group=self._messages)
        length = int(head[:8].view(torch.int64))
        body = head[8 : 8 + length]
        if length > body.numel():
            rest = torch.empty(length - body.numel(), dtype=torch.uint8)
            dist.broadcast(rest, 0, group=self._messages)
            body = torch.cat((body, rest))
        heard: Message = json.loads(body.numpy().tobytes())
        return heard

    def leave(self) -> None:
        """Rank 0 has closed: say that this is no accident, and go."""
        dist.send(torch.zeros(1, dtype=torch.uint8), 0, group=self._watching)
        self._closed = True
        self._leave()

    # heads; every rank calls these in the same order

    def scatter_heads(
        self, heads: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        """Each rank gets its own heads.

        Args:
            heads: [..., all heads, head_dim] on the device of rank 0; None on the others.
            shape, dtype: of the result.

        Returns:
            [..., heads of this rank, head_dim].
        """
        mine = torch.empty(shape, dtype=dtype, device=self._device)
        parts = None if heads is None else [one.contiguous() for one in heads.chunk(self.count, -2)]
        dist.scatter(mine, parts, 0)
        return mine

    def gather_heads(self, heads: Tensor) -> Tensor | None:
        """All heads on rank 0, None on the others.

        Args:
            heads: [..., heads of this rank, head_dim].

        Returns:
            [..., all heads, head_dim].
        """
        heads = heads.contiguous()
        parts = [torch.empty_like(heads) for _ in range(self.count)] if self.leads else None
        dist.gather(heads, parts, 0)
        return None if parts is None else torch.cat(parts, -2)

    def all_heads(self, heads: Tensor) -> Tensor:
        """All heads on every rank, [heads of this rank, ...] to [all heads, ...]."""
        heads = heads.contiguous()
        parts = [torch.empty_like(heads) for _ in range(self.count)]
        dist.all_gather(parts, heads)
        return torch.cat(parts)

    # inside

    def _tell(self, message: Message) -> None:
        text = json.dumps(message, separators=(",", ":")).encode()
        body = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        head = torch.zeros(HEAD_BYTES, dtype=torch.uint8)
        head[:8] = torch.tensor([len(text)]).view(torch.uint8)
        first, rest = body[: HEAD_BYTES - 8], body[HEAD_BYTES - 8 :]
        head[8 : 8 + first.numel()] = first
        dist.broadcast(head, 0, group=self._messages)
        if rest.numel():
            dist.broadcast(rest.clone(), 0, group=self._messages)

    def _watch(self, rank: int) -> None:
        try:
            dist.recv(torch.empty(1, dtype=torch.uint8), rank, group=self._watching)
        except (RuntimeError, ValueError):
            if not self._closed:
                self._failure = f"Rank {rank} of {self.count} has ended: see what it printed."
                logger.error(self._failure)

    def _failed(self, error: BaseException) -> LazyRagError:
        """Note why the group has failed; a rank that died is found out a moment later."""
        until = time.monotonic() + BLAME_S
        while self._failure is None and isinstance(error, RuntimeError):
            if time.monotonic() > until:
                break
            time.sleep(0.01)
        if self._failure is None:
            self._failure = f"A pass over {self.count} ranks failed: {_first_line(error)}."
            if "timed out" in str(error).lower():  # gloo has no class of its own for this
                others = "Rank 1" if self.count == 2 else f"One of the ranks 1 to {self.count - 1}"
                self._failure = f"{others} did not answer within {ANSWER_S:.0f} s."
        return LazyRagError(f"{self._failure} Start the program again.")

    def _leave(self) -> None:
        if self._owned and dist.is_initialized():
            dist.destroy_process_group()


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
