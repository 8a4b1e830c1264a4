"""Few cases in place of many: those that differ in a name or a size alone, and products of parameters."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from itertools import combinations, cycle, islice, product
from typing import Any

import pytest

# Operators that have little in common: a softmax over positions, axis means as queries and keys, no softmax at all.
UNLIKE = ("softmax", "kronecker_qkv", "siamese")


def partly(values: Iterable[Any], often: Container[Any] = UNLIKE) -> list[Any]:
    """All values, for `pytest.mark.parametrize`; all but those that run often are marked slow. A tuple is a case."""
    cases = [(value, value if isinstance(value, tuple) else (value,)) for value in values]
    return [pytest.param(*case, marks=[] if value in often else pytest.mark.slow) for value, case in cases]


def pairwise(**values: Mapping[str, Any] | Iterable[Any]) -> tuple[str, list[Any]]:
    """Names and cases for `pytest.mark.parametrize`: few cases in which every two values of two parameters meet.

    Most faults need one value or two; those that need three are left to the fuzz, which draws from the product. The
    values of a parameter are a sequence, or a dictionary from the part of the case's name to the value.
    """
    named = [
        dict(each) if isinstance(each, Mapping) else {str(value): value for value in each} for each in values.values()
    ]
    cases = [(case, set(combinations(enumerate(case), 2))) for case in product(*named)]
    missing, chosen = set().union(*(pairs for _, pairs in cases)), []
    while missing:
        case, pairs = max(cases, key=lambda each: len(each[1] & missing))
        missing -= pairs
        chosen.append(case)
    return ",".join(values), [
        pytest.param(*(each[key] for each, key in zip(named, case, strict=True)), id="-".join(case)) for case in chosen
    ]


def in_turn(**values: Mapping[str, Any] | Iterable[Any]) -> tuple[str, list[Any]]:
    """Names and cases for `pytest.mark.parametrize`: as many as the longest parameter has; the others take turns.

    For parameters that do not depend on each other: every value occurs, few pairs do.
    """
    named = [
        dict(each) if isinstance(each, Mapping) else {str(value): value for value in each} for each in values.values()
    ]
    count = max(map(len, named))
    turns = [list(islice(cycle(each.items()), count)) for each in named]
    return ",".join(values), [
        pytest.param(*(value for _, value in case), id="-".join(key for key, _ in case))
        for case in zip(*turns, strict=True)
    ]
