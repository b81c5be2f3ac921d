"""Several processes that share each batch, as ``torchrun`` starts them; one process is the usual case.

Every process evaluates its frames of a batch and the gradients are added up, one all-reduce a step, so that all of them
make the same step. A process without frames in a batch adds zeros.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Group:
    """The processes of a training.

    Attributes:
        rank: Number of this process, from 0.
        size: How many there are.
    """

    rank: int = 0
    size: int = 1

    @classmethod
    def join(cls, device: torch.device) -> Group:
        """The group that the environment speaks of (``WORLD_SIZE`` and so on), or this process alone."""
        if int(os.environ.get("WORLD_SIZE", "1")) < 2:
            return cls()
        if not distributed.is_initialized():
            distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
        return cls(distributed.get_rank(), distributed.get_world_size())

    def leave(self) -> None:
        """Wait for the others, then end what :meth:`join` began: who goes first must not take the others along."""
        if self.size > 1 and distributed.is_initialized():
            distributed.barrier()
            distributed.destroy_process_group()

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
    from nepcore.calculator import _find_device

    local = os.environ.get("LOCAL_RANK")
    if local is not None and name in {"auto", "cuda"} and torch.cuda.is_available():
        return _find_device(f"cuda:{int(local) % torch.cuda.device_count()}")
    return _find_device(name)
