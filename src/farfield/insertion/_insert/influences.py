"""Follow the operations of a run, to know which places of a model its output depends on."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from farfield.insertion._places import Place
from farfield.nn.tracing import tensors

# They read the shape of their input, and no number.
_LIKE = {f"{fill}_like" for fill in ("empty", "full", "ones", "rand", "randint", "randn", "zeros")}
_LIKE |= {f"new_{fill}" for fill in ("empty", "empty_strided", "full", "ones", "zeros")}


class Influences(TorchDispatchMode):
    """Note of each tensor, within the context, from which marked tensors it is computed."""

    def __init__(self) -> None:
        super().__init__()
        # Of each place a bit.
        self.marks: dict[Place, int] = {}
        # Address of a storage -> where a tensor lies in it -> the bits of what it is computed from.
        self.bits: dict[int, dict[Any, int]] = {}
        # Of the numbers that Python has read, by which a model may choose what it computes.
        self.read = 0

    def mark(self, place: Place, value: Any) -> None:
        """Mark what a place returns, if it is a tensor."""
        if isinstance(value, Tensor):
            bit = self.marks.setdefault(place, 1 << len(self.marks))
            self._add(value, bit)

    def names(self, value: Any) -> set[Place]:
        """Return the places on which the tensors in a value depend."""
        bits = self._read(value) | self.read
        return {place for place, bit in self.marks.items() if bits & bit}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        arguments, name = func._schema.arguments, func.overloadpacket.__name__
        given = dict(zip((each.name for each in arguments), args, strict=False)) | (kwargs or {})
        read = {} if name in _LIKE else dict(given)
        if name == "where" and "self" in given and not given["condition"].is_meta:
            # Of a side that is chosen nowhere, no number is read.
            for side, chosen in (("self", given["condition"]), ("other", given["condition"].logical_not())):
                if not chosen.any():
                    del read[side]
        bits, made = self._read(read), tensors(outputs)
        written = [each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write]
        for tensor in tensors([given.get(each) for each in written]):
            self._add(tensor, bits)
            parts = self.bits[_lies(tensor)[0]]
            parts.update({where: own | bits for where, own in parts.items()})
        if outputs is not None and not made:
            self.read |= bits
        # A new storage may have the address of one that is gone.
        for address in {_lies(tensor)[0] for tensor in made} - {_lies(tensor)[0] for tensor in tensors(given)}:
            self.bits[address] = {}
        for tensor in made:
            self._add(tensor, bits)
        return outputs

    def _add(self, tensor: Tensor, bits: int) -> None:
        address, where = _lies(tensor)
        parts = self.bits.setdefault(address, {})
        parts[where] = parts.get(where, 0) | bits

    def _read(self, value: Any) -> int:
        bits = 0
        for address, where in map(_lies, tensors(value)):
            parts = self.bits.get(address, {})
            bits |= parts[where] if where in parts else reduce(or_, parts.values(), 0)
        return bits


def _lies(tensor: Tensor) -> tuple[int, Any]:
    """Return the address of a tensor's storage, and where the tensor lies in it."""
    try:
        where = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        return tensor.untyped_storage()._cdata, where
    except RuntimeError:  # nested and sparse tensors have several
        return 0, None


def are_equal(one: Any, other: Any) -> bool:
    """Whether two outputs hold equal numbers; NaN equals NaN."""
    pairs = list(zip(tensors(one), tensors(other), strict=False))
    return len(tensors(one)) == len(tensors(other)) and all(
        a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all()) for a, b in pairs
    )
