"""Who is there: nodes by the clients' own numbers, as they come, leave, and come back under another name."""

import sys
import time
from collections.abc import Callable
from typing import Any

from flwr.app import Message

from fedstride.deploy import wire
from fedstride.errors import FedstrideError

LOOK = 3.0  # seconds between looks for nodes
POLL = 0.1  # seconds between looks for anything
GREETED = 8  # at the same time, since on one machine every answer is a process
AGAIN = 30.0  # seconds until a node that could not say who it is is asked again

Admit = Callable[[int, int], str]  # client, its number of examples -> why it is not let in; empty: it is


class Roll:
    """Asks every node for its client's number; a number belongs to the node that had it first, while that is there."""

    def __init__(self, grid: Any, admit: Admit):
        self._grid, self._admit = grid, admit
        self.nodes: dict[int, int] = {}  # client -> the node where it is now
        self.sizes: dict[int, int] = {}  # everybody's number of examples, also of those who have left
        self.strange: set[int] = set()  # clients with data of their own, which the server does not have
        self._facts: dict[int, tuple[int, int]] = {}  # node -> client and number of examples
        self._asked: dict[str, tuple[int, float]] = {}  # greetings under way -> node, and when
        self._mute: dict[int, float] = {}  # nodes that could not answer -> when
        self._looked = -LOOK
        self._said: set[str] = set()

    def meet(self, clients: int, awaited: set[int], timeout: float) -> None:
        """Wait for so many clients, or, when a run goes on, for those who were there; not for ever."""
        start = time.monotonic()
        while not awaited.issubset(self.nodes) if awaited else len(self.nodes) < clients:
            self.look()
            if time.monotonic() - start > timeout:
                if awaited and self.nodes:
                    self._say(
                        f"clients {sorted(awaited - set(self.nodes))} have not come back; it goes on without them"
                    )
                    return
                raise FedstrideError(
                    f"clients {sorted(self.nodes)} have come within {timeout:g} s, {len(awaited) or clients} are "
                    "needed; each needs its own number"
                )
            time.sleep(POLL)

    def look(self) -> list[int]:
        """Greet who is new, forget who is gone; the clients that have come, or come back, since the last look."""
        now = time.monotonic()
        if now - self._looked < LOOK:
            return []
        self._looked = now
        there = set(self._grid.get_node_ids())
        self._facts = {node: facts for node, facts in self._facts.items() if node in there}
        self._mute = {node: at for node, at in self._mute.items() if node in there and now - at < AGAIN}
        self.nodes = {client: node for client, node in self.nodes.items() if node in there}
        for number, (node, at) in list(self._asked.items()):
            if now - at > AGAIN:  # or a few that do not answer would keep everybody else out
                del self._asked[number]
                self._mute[node] = now
        self._greet(
            sorted(there - set(self._facts) - set(self._mute) - {node for node, _ in self._asked.values()}), now
        )
        self._listen(now)
        return [client for node, (client, size) in sorted(self._facts.items()) if self._enter(node, client, size)]

    def lose(self, client: int) -> None:
        """The client's node cannot be reached any more."""
        self._facts.pop(self.nodes.pop(client), None)

    def _greet(self, new: list[int], now: float) -> None:
        new = new[: GREETED - len(self._asked)]
        greeting = {"hello": True}
        requests = [Message(wire.pack(greeting, ()), dst_node_id=n, message_type="query", group_id="0") for n in new]
        if requests:
            numbers = self._grid.push_messages(requests)
            self._asked |= {number: (node, now) for number, node in zip(numbers, new) if number}

    def _listen(self, now: float) -> None:
        for reply in self._grid.pull_messages(list(self._asked)) if self._asked else ():
            node, _ = self._asked.pop(reply.metadata.reply_to_message_id, (None, now))
            if node is None:
                continue
            try:
                if reply.has_error():
                    raise FedstrideError(reply.error.reason)
                facts = wire.unpack(reply.content)[0]
                self._facts[node] = int(facts["client"]), int(facts["size"])
                if facts["own"]:
                    self.strange.add(int(facts["client"]))
            except (FedstrideError, KeyError, TypeError, ValueError, OverflowError) as error:
                self._mute[node] = now
                self._say(f"client at node {node} failed: {error}")

    def _enter(self, node: int, client: int, size: int) -> bool:
        holder = self.nodes.get(client)
        if holder is not None:
            if holder != node:
                self._say(
                    f"client {client} is the name of two nodes; each needs its own number, so the newer one waits"
                )
            return False
        why = self._admit(client, size)
        if why:
            self._say(f"client {client} is not let in: {why}")
            return False
        self.nodes[client], self.sizes[client] = node, size
        self.nodes = dict(sorted(self.nodes.items()))
        return True

    def _say(self, words: str) -> None:
        """Once."""
        if words not in self._said:
            sys.stderr.write(words + "\n")
        self._said.add(words)
