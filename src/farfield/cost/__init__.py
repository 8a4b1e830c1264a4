"""The cost of attention: by formula, by counting the MACs that execute, and by measuring.

`predict` computes it by formula, before anything runs; `count` runs a module on fake tensors, which have shapes and no
values, and counts the MACs that execute; `measure` measures seconds and bytes on this machine, `compare` those of
several modules in turns, `saved_bytes` the bytes that a forward pass keeps for its backward pass. `plan` lists which
operators fit in memory. `roofline` compares a measured time with the least that this machine could take.
"""

from farfield.cost.counting import Cost, count
from farfield.cost.formulas import FORMULAS
from farfield.cost.least_time import Roofline, roofline
from farfield.cost.measuring import Measurement, compare, measure, saved_bytes
from farfield.cost.planning import Needs, Plan, plan
from farfield.cost.prediction import predict

__all__ = [
    "FORMULAS",
    "Cost",
    "Measurement",
    "Needs",
    "Plan",
    "Roofline",
    "compare",
    "count",
    "measure",
    "plan",
    "predict",
    "roofline",
    "saved_bytes",
]
