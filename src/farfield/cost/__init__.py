"""What attention costs: by formula, by counting what executes, and by measuring it.

`predict` answers before anything runs, from a formula for each row; `count` runs a module on tensors without numbers
and counts the MACs that really execute; `measure` takes seconds and bytes on this machine, `compare` those of
several modules in turns, `saved_bytes` what one keeps for its gradients. `plan` says which operators fit a memory.
`predict_module` has FA's modules of `MODULES`, with what stands around their attention.
"""

from farfield.cost.counting import Cost, count
from farfield.cost.formulas import FORMULAS
from farfield.cost.measuring import Measurement, compare, measure
from farfield.cost.memory import saved_bytes
from farfield.cost.modules import MODULES, predict_module
from farfield.cost.planning import Needs, Plan, plan
from farfield.cost.prediction import predict

__all__ = [
    "FORMULAS",
    "MODULES",
    "Cost",
    "Measurement",
    "Needs",
    "Plan",
    "compare",
    "count",
    "measure",
    "plan",
    "predict",
    "predict_module",
    "saved_bytes",
]
