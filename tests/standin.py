"""A stand-in for Flower's grid: real Flower messages, packed to bytes and unpacked, between apps in one process."""

import json
import random

import pytest
from flwr.app import Context, Error, Message, RecordDict
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as Proto
from flwr.supercore.task_identity import TaskIdentity

from fedstride.deploy import apps, network, roll

SERVER = 1


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Nobody waits between looks; for the modules that import it."""
    monkeypatch.setattr(network, "POLL", 0.0)
    monkeypatch.setattr("fedstride.deploy.server.POLL", 0.0)
    monkeypatch.setattr(roll, "POLL", 0.0)
    monkeypatch.setattr(roll, "LOOK", 0.0)


def travel(message):
    """Over the wire and back."""
    return message_from_proto(Proto.FromString(message_to_proto(message).SerializeToString()))


class Standin:
    """Nodes that answer when their replies are pulled, some at a time, in an order of their own."""

    def __init__(self, experiment, clients, folder, seed=0, spoil=None, at_once=1):
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, SERVER, 1
        config = {"experiment": json.dumps(experiment.dump())}
        self.contexts = {
            100 + client: Context(
                1, 100 + client, {"client": client, "folder": str(folder / str(client))}, RecordDict(), config
            )
            for client in range(clients)
        }
        self.waiting, self.count, self.trained = {}, 0, []
        self.random, self.spoil = random.Random(seed), spoil or (lambda grid, message, reply: [reply])
        self.bytes, self.at_once = 0, at_once

    def get_node_ids(self):
        return list(self.contexts)

    def push_messages(self, messages):
        numbers = []
        for message in messages:
            if message.metadata.dst_node_id not in self.contexts:
                numbers.append("")  # as the link does
                continue
            self.count += 1
            number = f"m{self.count}"
            message.metadata.__dict__["_message_id"] = number  # the link's part
            self.waiting[number] = travel(message)
            self.bytes += len(message_to_proto(message).SerializeToString())
            numbers.append(number)
        return numbers

    def pull_messages(self, numbers):
        """Some of those asked for, drawn at random, so that replies come in any order."""
        there = [number for number in numbers if number in self.waiting]
        chosen = self.random.sample(there, min(self.at_once, len(there)))
        return [reply for number in chosen for reply in self._answer(number)]

    def _answer(self, number):
        message = self.waiting.pop(number)
        context = self.contexts.get(message.metadata.dst_node_id)
        if context is None:
            return [travel(Message(Error(code=0, reason="the node is gone"), reply_to=message))]
        try:
            reply = apps.client(message, context)
        except Exception as error:  # as Flower does: what an app raises becomes an error reply
            reply = Message(Error(code=0, reason=str(error)), reply_to=message)
        self.trained.append(message.metadata.dst_node_id - 100)
        return [travel(one) for one in self.spoil(self, message, reply)]
