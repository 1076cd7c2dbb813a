"""DLSGD: delayed local SGD, for homogeneous and for heterogeneous data."""

from fedstride.algorithm import Algorithm, Delta, Params, check_number, check_whole, register
from fedstride.schedule import FirstArrivals, SendBuffers


class _Delayed(Algorithm):
    """What both share: local SGD from a model that may be old, and a server that adds mean displacements."""

    weights = "uniform"
    displacements = True
    n: int
    server_lr: float

    def __post_init__(self):
        check_whole(self, "n", 1)
        check_number(self, "server_lr", 0, open=True)

    def client(self, work, msg, memory):
        return Delta(work.descend(msg.x) - msg.x), memory

    def server(self, state, replies):
        return Params(state.x + self.server_lr * replies.mean("dx"))


@register("dlsgd-homo")
class DlsgdHomo(_Delayed):
    """Delayed local SGD where all clients have the same distribution: the server takes the first n updates.

    Paper: the DLSGD paper, Algorithm 1.

    Rule: a client takes the newest model from its receive buffer, does K steps `y <- y - lr g_i(y)`, sends `D_i = y -
    x`, and goes on with the next model; with an empty buffer it is idle. The server takes `x <- x + (server_lr / n) sum
    D_i` over the first n arrivals and sends x to everybody.

    Deviations: Eq. (3) prints a minus sign, with which the step would go uphill. A client is busy until its update is
    sent, since it has no send buffer. Of updates that arrive at the same moment, those whose training was planned first
    go first.

    Limits: with equal speeds, n = N gives Local-SGD; K = 1 gives AsySG. On heterogeneous data it rests where clients
    weigh as often as they arrive; `dlsgd-homo` and FedBuff share that bias, `dlsgd-hetero` does not.
    """

    n: int = 2
    server_lr: float = 1.0  # eta

    @property
    def schedule(self):
        return FirstArrivals(self.n)


@register("dlsgd-hetero")
class DlsgdHetero(_Delayed):
    """Delayed local SGD for heterogeneous data: the server draws whose updates it takes, so nobody counts by speed.

    Paper: the DLSGD paper, Algorithm 2.

    Rule: clients train as in `dlsgd-homo`, but leave `D_i` in a send buffer, where a newer one overwrites it. The
    server draws n clients uniformly with replacement, waits for an update of each, and takes `x <- x + (server_lr / n)
    sum D_i`, multiplicity counted.

    Deviations: the paper leaves open whether a sent update stays in the buffer: it is cleared, or kept with
    `resend=True`. Line 9 of the algorithm sends the old model; here it is the new one. Whose update is not finite is
    left out of the mean.

    Limits: without delay it is Generalized FedAvg with the same draws. Biased like FedAvg for K > 1.
    """

    n: int = 2
    server_lr: float = 1.0  # eta
    resend: bool = False

    @property
    def schedule(self):
        return SendBuffers(self.n, self.resend)
