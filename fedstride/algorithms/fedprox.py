"""FedProx."""

from fedstride.algorithm import Algorithm, Delta, Params, check_number, register


@register("fedprox")
class FedProx(Algorithm):
    """FedAvg with a proximal term that ties the local model to the server's.

    Paper: Li et al., "Federated optimization in heterogeneous networks", MLSys 2020, Algorithm 2.

    Rule: `y <- y - lr (g_i(y) + mu (y - x))`, K_i steps; the server averages as FedAvg does.

    Deviations: the paper samples clients by weight and averages uniformly; here the run's participation decides.

    Limits: `mu = 0` is FedAvg. Biased: on quadratics it rests at `(sum w_i P_i)^-1 sum w_i P_i c_i` with
    `P_i = (I - (I - lr (A_i + mu I))^K_i) (A_i + mu I)^-1 A_i`.
    """

    displacements = True
    mu: float = 0.1

    def __post_init__(self):
        check_number(self, "mu")

    def client(self, work, msg, memory):
        y = work.descend(msg.x, lambda g, y, x: g + self.mu * (y - x), rows=(msg.x,))
        return Delta(y - msg.x), memory

    def server(self, state, replies):
        return Params(state.x + replies.mean("dx"))
