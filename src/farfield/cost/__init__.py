"""What attention costs: by formula, by counting what executes, and by measuring it.

`predict` answers before anything runs, from a formula for each row; `count` runs a module on tensors without numbers
and counts the multiply-adds that really execute; `measure` takes seconds and bytes on this machine.
"""

from farfield.cost.counting import Cost, count
from farfield.cost.formulas import FORMULAS
from farfield.cost.measuring import Measurement, measure
from farfield.cost.prediction import predict

__all__ = ["FORMULAS", "Cost", "Measurement", "count", "measure", "predict"]
