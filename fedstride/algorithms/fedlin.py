"""FedLin."""

from fedstride.algorithm import register
from fedstride.algorithms.tracking import GradientTracking


@register("fedlin")
class FedLin(GradientTracking):
    """Gradient tracking in which every client travels equally far, whatever its number of steps.

    Paper: Mitra et al., "Linear convergence in federated learning: tackling client heterogeneity and sparse gradients",
    NeurIPS 2021, without compression.

    Rule: `y <- y - (lr / tau_i) (g_i(y) - g_i(x) + gf)`, tau_i steps; `x <- mean(y)`.

    Deviations: a client whose gradient is missing is represented by its last one. tau_i is the number of steps asked
    for.
    """

    full_only = True

    def rate(self, work, msg):
        return work.lr / work.target
