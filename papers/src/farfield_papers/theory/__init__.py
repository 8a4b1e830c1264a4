"""KAN's Theorem 1: the information that axis means keep of a feature map; and the cost of FA's modules by formula.

KAN (Kronecker attention networks, KDD 2020) models a feature map X (h × w) as normal. The covariance of vec(Xᵀ), the
positions in row-major order, is a Kronecker product Ω⊗Ψ or a Kronecker sum Ω⊕Ψ = Ω⊗I + I⊗Ψ of Ω (h × h), between rows,
and Ψ (w × w), between columns. Under the sum, with diagonal Ω and Ψ and a mean that is an outer sum, independent copies
of the average row and of the average column add up to a matrix X̃ of the same kind (Theorem 1): this is why the
Kronecker operators attend to axis means.

The theorem does not state two limits: X̃ has the mean of X only up to a constant, and its covariance is *not* a multiple
of that of X. For h = w it is (Ω⊕Ψ)/h plus a multiple of I, and only its trace is 2/h times the trace of X's (Eq. 7).

`predict_module` has the formulas of FA's modules (`MODULES`): attention and the layers around it.
"""

from farfield_papers.theory.fa_modules import MODULES, predict_module
from farfield_papers.theory.matrix_normal import MatrixNormal
from farfield_papers.theory.theorem import Averages, averages, outer_sum, reconstruct

__all__ = ["MODULES", "Averages", "MatrixNormal", "averages", "outer_sum", "predict_module", "reconstruct"]
