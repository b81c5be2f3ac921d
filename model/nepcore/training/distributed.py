"""Several processes that share each batch, as ``torchrun`` starts them; one process is the usual case.

Every process evaluates its frames of a batch and the gradients are added up, one all-reduce a step, so that all of them
make the same step. A process without frames in a batch adds zeros. ``DistributedDataParallel`` is not used: it averages
gradients of modules, bucket by bucket as a backward pass reaches them; here all parameters are one vector, whose
gradient is complete at once, and is summed, since the weights of the loss count the labels of the whole batch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.distributed.rendezvous import rendezvous

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

PATIENCE = timedelta(minutes=30)
"""How long the processes wait for each other at the end: the leading one writes reports meanwhile."""


@dataclass(frozen=True)
class Group:
    """The processes of a training.

    Attributes:
        rank: Number of this process, from 0.
        size: How many there are.
        store: Where they leave notes for each other, if :meth:`join` began the group.
    """

    rank: int = 0
    size: int = 1
    store: Any = field(default=None, compare=False, repr=False)

    @classmethod
    def join(cls, device: torch.device) -> Group:
        """The group that the environment speaks of (``WORLD_SIZE`` and so on), or this process alone."""
        if int(os.environ.get("WORLD_SIZE", "1")) < 2:
            return cls()
        if distributed.is_initialized():
            return cls(distributed.get_rank(), distributed.get_world_size())
        store, rank, size = next(rendezvous("env://"))
        backend = "nccl" if device.type == "cuda" else "gloo"
        distributed.init_process_group(backend, store=store, rank=rank, world_size=size)
        return cls(rank, size, store)

    def leave(self) -> None:
        """Wait for the others, then end what :meth:`join` began: who goes first must not take the others along.

        They wait by notes in the store. After a barrier, one process would close its connections while another still
        reads from them. The process that holds the store goes last.
        """
        if self.size == 1 or self.store is None or not distributed.is_initialized():
            return
        self._note("done", range(self.size))
        self._note("gone", range(self.size) if self.leads else ())
        distributed.destroy_process_group()

    def _note(self, what: str, whose: Iterable[int]) -> None:
        self.store.set(f"nepcore/{what}/{self.rank}", "yes")
        self.store.wait([f"nepcore/{what}/{rank}" for rank in whose], PATIENCE)

    @property
    def leads(self) -> bool:
        """Whether this process is the one that writes and speaks."""
        return self.rank == 0

    def add(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over all processes."""
        if self.size > 1:
            distributed.all_reduce(tensor)

    def least(self, tensor: Tensor) -> None:
        """Replace a tensor by its minimum over all processes."""
        if self.size > 1:
            distributed.all_reduce(tensor, op=distributed.ReduceOp.MIN)

    def agree(self, flag: bool, device: torch.device) -> bool:
        """Whether any process says so; all of them have to ask."""
        if self.size == 1:
            return flag
        value = torch.tensor(float(flag), device=device)
        distributed.all_reduce(value, op=distributed.ReduceOp.MAX)
        return bool(value.item())

    def shared(self, value: Any) -> Any:
        """What the leading process has."""
        if self.size == 1:
            return value
        box = [value]
        distributed.broadcast_object_list(box, src=0)
        return box[0]


def device_of(name: str) -> torch.device:
    """The device for this process: ``auto`` and ``cuda`` mean the GPU of its number on this host.

    Raises:
        nepcore.errors.ModelError: It is not there.
    """
    from nepcore.calculator import find_device

    local = os.environ.get("LOCAL_RANK")
    if local is not None and name in {"auto", "cuda"} and torch.cuda.is_available():
        return find_device(f"cuda:{int(local) % torch.cuda.device_count()}")
    return find_device(name)
