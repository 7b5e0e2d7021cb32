"""A linear layer whose weight stays packed: one registry of kernels, dispatch on device, grid and rows."""

from abc import ABC, abstractmethod
from math import prod

import torch
from torch import Tensor

from formats.checkpoint import Checkpoint
from formats.qtensor import QTensor
from formats.registry import Registry

KERNELS = Registry(
    "kernel",
    {
        "reference": "runtime.kernels.reference:ReferenceKernel",
        "cpu": "runtime.kernels.cpu:CpuKernel",
        "cpu-int8": "runtime.kernels.cpu:CpuInt8Kernel",
        "triton": "runtime.kernels.triton_linear:TritonKernel",
    },
)


class Kernel(ABC):
    """A weight [out, in] in the form that one multiplication routine reads. Subclasses are registered in KERNELS.

    fusable: may `kernels/graph.py` run this linear inside its compiled step?
    """

    fusable = False

    @abstractmethod
    def __init__(self, weight: "Tensor | QTensor", device: str, dtype: torch.dtype) -> None:
        """Repack `weight` onto `device`; activations will be `dtype`."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """x [M, in] -> [M, out], same dtype."""

    @abstractmethod
    def rows(self, ids: Tensor) -> Tensor:
        """Dequantised weight rows (embedding look-up): ids int64 [n] -> [n, in]."""

    @abstractmethod
    def nbytes(self) -> int:
        """Memory held, in bytes."""

    @abstractmethod
    def describe(self, m: int) -> str:
        """What runs for m rows, for `inspect`."""


AUTOMATIC = {"auto": "cpu", "fast": "cpu-int8"}  # on a CPU; on a GPU both are "triton"


def choose_kernel(kernel: str, device: str) -> str:
    """The registered kernel that "auto" (exact) or "fast" (activations may be rounded to 8 bits) means on a device."""
    if kernel not in AUTOMATIC:
        return kernel
    return AUTOMATIC[kernel] if device == "cpu" else "triton"


def kernels_by_grid(checkpoint: Checkpoint, kernel: str = "fast", device: str = "cpu") -> dict[str, str]:
    """What multiplies one row by the weights of each grid; found out on the smallest matrix of a kind."""
    smallest: dict[str, str] = {}
    for name in sorted(checkpoint.names(), key=lambda name: prod(checkpoint.shape(name))):
        stored = checkpoint.stored_as(name)
        if len(checkpoint.shape(name)) == 2 and name.endswith(".weight"):
            smallest.setdefault(stored if isinstance(stored, str) else stored.name, name)
    build = KERNELS[choose_kernel(kernel, device)]
    return {kind: build(checkpoint.read(name), device, torch.float32).describe(1) for kind, name in smallest.items()}


class QuantizedLinear:
    """y = x W^T + b with W a QTensor (kept packed) or a float tensor."""

    def __init__(
        self,
        weight: "Tensor | QTensor",
        bias: Tensor | None = None,
        kernel: str = "auto",
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        name: str = "",
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self.name = name
        self.grid = weight.grid.name if isinstance(weight, QTensor) else str(weight.dtype).removeprefix("torch.")
        self.kernel: Kernel = KERNELS[choose_kernel(kernel, device)](weight, device, dtype)
        self.bias = None if bias is None else bias.to(device, dtype)

    def __call__(self, x: Tensor) -> Tensor:
        y = self.kernel(x)
        return y if self.bias is None else y + self.bias

    def rows(self, ids: Tensor) -> Tensor:
        return self.kernel.rows(ids)
