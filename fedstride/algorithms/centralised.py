"""Centralised SGD: the reference that no federation can ask for."""

from fedstride.algorithm import Algorithm, Delta, Params, register


@register("centralised")
class Centralised(Algorithm):
    """Plain SGD on the pooled data; not federated, so nothing travels and it cannot be deployed.

    Rule: `x <- x - lr g(x)`, in every round as many steps as the whole fleet would do together.

    It declares `pooled`: the runner hands all data to one client and adds up the steps.
    """

    pooled = True

    @property
    def traffic(self):
        return (0, 0)

    def client(self, work, msg, memory):
        y = work.descend(msg.x)
        return Delta(y - msg.x), memory

    def server(self, state, replies):
        return Params(state.x + replies.mean("dx"))
