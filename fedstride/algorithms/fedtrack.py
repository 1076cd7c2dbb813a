"""FedTrack."""

from fedstride.algorithm import register
from fedstride.algorithms.tracking import GradientTracking


@register("fedtrack")
class FedTrack(GradientTracking):
    """Gradient tracking with part of the fleet: who is absent is represented by the last gradient.

    Paper: as compared in the o(1/t) paper, there with full participation and step 1 / (18 tau L).

    Rule: a participant refreshes its gradient m_i at x; `gf = sum w_i m_i` over everybody; `y <- y - lr (g_i(y) - m_i
    + gf)`.
    """

    def rate(self, work, msg):
        return work.lr
