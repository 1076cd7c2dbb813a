"""FedAvg, and with it Local-SGD and Generalized FedAvg."""

from fedstride.algorithm import Algorithm, Delta, Params, check_number, register


@register("fedavg")
class FedAvg(Algorithm):
    """Federated averaging.

    Paper: McMahan et al., "Communication-efficient learning of deep networks from decentralized data", AISTATS 2017,
    Algorithm 1.

    Rule: every client does K_i steps `y <- y - lr g_i(y)` from x; the server takes `x <- x + server_lr mean(y_i - x)`.

    Settings: `server_lr = 1` is the paper. Any other with uniform draws with replacement is Generalized FedAvg; equal
    steps, uniform weights and homogeneous data make it Local-SGD.

    Limits: biased under heterogeneous data as soon as a client does more than one step. On quadratics with exact
    gradients it rests at `(sum w_i B_i)^-1 sum w_i B_i c_i`, `B_i = I - (I - lr A_i)^K_i`, which the tests check.
    """

    displacements = True
    server_lr: float = 1.0  # eta_g

    def __post_init__(self):
        check_number(self, "server_lr", 0, open=True)

    def client(self, work, msg, memory):
        y = work.descend(msg.x)
        return Delta(y - msg.x), memory

    def server(self, state, replies):
        return Params(state.x + self.server_lr * replies.mean("dx"))
