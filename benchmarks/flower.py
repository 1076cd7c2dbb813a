"""FedAvg in Flower's simulation (Ray) on the work of `peers.py`. usage: flower.py FOLDER

One process a core, each with one thread, which is Flower's way of using all cores. The server names the user in its
message, because it does not know which node holds which partition.
"""

import sys
import time
from typing import Any, cast

import work
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

client = ClientApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    config = message.content.config_records["config"]
    job = work.read(str(config["folder"]))  # once a process
    module = job.module()
    module.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    work.train(module, job, cast(int, config["user"]))
    answer = RecordDict()
    answer["arrays"], answer["metrics"] = ArrayRecord(module.state_dict()), MetricRecord({"num-examples": 1})
    return Message(answer, reply_to=message)


class Listed(FedAvg):
    """FedAvg with a list of cohorts, and a stopwatch."""

    def __init__(self, folder: str, cohorts: list[list[int]]):
        super().__init__(fraction_evaluate=0.0)
        self.folder, self.cohorts, self.times = folder, cohorts, [0.0]

    def configure_train(self, server_round, arrays, config, grid):
        """One message a user of this round's cohort."""
        if server_round == 1:
            self.times = [time.time()]
        nodes = sorted(grid.get_node_ids())
        return [
            Message(
                RecordDict({"arrays": arrays, "config": ConfigRecord({"folder": self.folder, "user": user})}),
                dst_node_id=nodes[user], message_type="train",
            )
            for user in self.cohorts[server_round - 1]
        ]  # fmt: skip

    def aggregate_train(self, server_round, replies):
        """Flower's own, then take the time."""
        result = super().aggregate_train(server_round, replies)
        self.times.append(time.time())
        return result


def main(folder: str) -> None:
    job = work.read(folder)
    strategy, server, module = Listed(folder, job.cohorts), ServerApp(), job.module()

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        while len(list(grid.get_node_ids())) < len(job.inputs):
            time.sleep(0.05)
        result = strategy.start(grid, ArrayRecord(module.state_dict()), num_rounds=len(job.cohorts))
        module.load_state_dict(result.arrays.to_torch_state_dict())

    resources: dict[str, Any] = {"num_cpus": 1, "num_gpus": 0.0}
    run_simulation(server, client, len(job.inputs), backend_config={"client_resources": resources})
    work.finish(folder, strategy.times, module)


if __name__ == "__main__":
    main(*sys.argv[1:])
