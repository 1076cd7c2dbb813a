"""AsySG."""

from fedstride.algorithm import Algorithm, Delta, Params, check_whole, register
from fedstride.schedule import FirstArrivals


@register("asysg")
class AsySG(Algorithm):
    """Asynchronous stochastic gradient: every upload is one gradient at a model that may be old.

    Paper: Lian et al., "Asynchronous parallel stochastic gradient for nonconvex optimization", NeurIPS 2015, as the
    DLSGD paper compares with it.

    Rule: a client takes one mini-batch gradient g_i at its newest model; the server takes `x <- x - lr mean(g_i)` over
    the first n arrivals and sends x to everybody. What travels is `-lr g_i`.

    Deviations: the mean of n gradients, as in the DLSGD paper; the original adds them up, which is n times the lr. The
    run's `steps` are not used: a job is one step.

    Limits: `dlsgd-homo` with one step and `server_lr = 1` is the same method.
    """

    weights = "uniform"
    displacements = True
    n: int = 2

    def __post_init__(self):
        check_whole(self, "n", 1)

    @property
    def schedule(self):
        return FirstArrivals(self.n)

    @property
    def local_steps(self):
        return 1

    def client(self, work, msg, memory):
        return Delta(work.descend(msg.x) - msg.x), memory

    def server(self, state, replies):
        return Params(state.x + replies.mean("dx"))
