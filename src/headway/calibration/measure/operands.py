"""Random operands of operators, cut from one block of device memory for each dtype.

Filling new memory for each shape takes four times as long as timing it: a sweep of 816 shapes on an H100 spent 0.5 s
per shape on set-up. A block is filled once, and grows when a shape needs more.
"""

from __future__ import annotations

from math import prod
from typing import Any

FILL_BYTES = 2**28
"""Bytes of random numbers that are drawn; the rest of a block repeats these numbers."""


class Operands:
    """Hands out tensors of normally distributed numbers. Tensors handed out since `reset` do not overlap."""

    def __init__(self, torch: Any, device: str) -> None:
        self.torch = torch
        self.device = device
        self._blocks: dict[Any, Any] = {}
        self._used: dict[Any, int] = {}

    def reset(self) -> None:
        """Start over: the next tensors may overlap all earlier ones."""
        self._used.clear()

    def release(self) -> None:
        """Return the blocks to PyTorch's allocator."""
        self._blocks.clear()
        self._used.clear()

    def reserve(self, num: int, dtype: Any) -> None:
        """Make room for `num` further elements of a dtype. Tensors from earlier calls keep their old block."""
        if len(self._blocks.get(dtype, ())) < self._used.get(dtype, 0) + num:
            self._blocks.pop(dtype, None)  # before the new block is made, because both may not fit
            self._used[dtype] = 0
            self._blocks[dtype] = self._filled(num, dtype)

    def normal(self, *size: int, dtype: Any = None) -> Any:
        """A contiguous tensor of this size, bf16 by default."""
        dtype = self.torch.bfloat16 if dtype is None else dtype
        num = prod(size)
        self.reserve(num, dtype)
        start = self._used.get(dtype, 0)
        self._used[dtype] = start + -(-num // 256) * 256  # kernels require aligned addresses
        return self._blocks[dtype][start : start + num].view(*size)

    def copies(self, copies: int, *size: int, dtype: Any = None) -> list[Any]:
        """Several tensors of this size, all in one block."""
        dtype = self.torch.bfloat16 if dtype is None else dtype
        self.reserve(copies * -(-prod(size) // 256) * 256, dtype)
        return [self.normal(*size, dtype=dtype) for _ in range(copies)]

    def _filled(self, num: int, dtype: Any) -> Any:
        drawn_num = min(num, FILL_BYTES // dtype.itemsize)
        drawn = self.torch.randn(drawn_num, device=self.device, dtype=self.torch.float32).to(dtype)
        if drawn_num == num:
            return drawn
        block = self.torch.empty(num, device=self.device, dtype=dtype)
        for start in range(0, num, drawn_num):
            part = block[start : start + drawn_num]
            part.copy_(drawn[: len(part)])
        return block
