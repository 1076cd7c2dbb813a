"""FedBuff."""

from fedstride.algorithm import Algorithm, Delta, Params, check_choice, check_number, check_whole, register
from fedstride.schedule import Buffered


@register("fedbuff")
class FedBuff(Algorithm):
    """Buffered asynchronous aggregation: the server acts whenever n updates have arrived, however old.

    Paper: Nguyen et al., "Federated learning with buffered asynchronous aggregation", AISTATS 2022, Algorithm 1.

    Rule: a fixed number of clients is at work; each does K_i steps from the model it was given and sends `D_i = y - x`;
    another one starts at once. Every n arrivals the server takes `x <- x + (server_lr / n) sum s(tau_i) D_i`, where
    tau_i counts the server updates since the client started. `staleness` "constant": s = 1; "polynomial":
    `s = (1 + tau)^-exponent`.

    Deviations: without differential privacy. The mean is over the n updates, not over their s.

    Limits: equal delays, n = N and the whole fleet at work give FedAvg with uniform weights. Fast clients count more
    often: on heterogeneous data it rests at the optimum weighted by arrival rates.
    """

    weights = "uniform"
    displacements = True
    n: int = 2  # K of the paper: the buffer's size
    concurrency: int | None = None  # clients at work; None: all
    server_lr: float = 1.0  # eta_g
    staleness: str = "constant"
    exponent: float = 0.5

    def __post_init__(self):
        check_whole(self, "n", 1)
        check_number(self, "server_lr", 0, open=True)
        check_choice(self, "staleness", ("constant", "polynomial"))
        check_number(self, "exponent")

    @property
    def schedule(self):
        return Buffered(self.concurrency, self.n)

    def factor(self, reply):
        return None if self.staleness == "constant" else (1 + reply.staleness) ** -self.exponent

    def client(self, work, msg, memory):
        return Delta(work.descend(msg.x) - msg.x), memory

    def server(self, state, replies):
        return Params(state.x + self.server_lr * replies.mean("dx"))
