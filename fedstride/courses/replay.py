"""Replay: a recorded run."""

from fedstride.courses.base import Course, Job, Work
from fedstride.world import Costs


class ReplayCourse(Course):
    """Somebody else's run: who trained from which version, and in which order it reached the server."""

    state = ("place", "queues")

    def __init__(self, costs: Costs, work: Work, seed: int, now: float, updates: tuple):
        super().__init__(costs, work, seed, now)
        self.updates = updates
        self.place = 0  # replies of this update so far
        self.queues: dict[int, list[int]] = {}  # client -> its jobs from known models, in order
        self._of_version: dict[int, list[tuple[int, int]]] = {}
        for position, update in enumerate(updates):
            for place, row in enumerate(update["jobs"]):
                self._of_version.setdefault(row["version"], []).append((position, place))
        self._first = [0]  # the number of every update's first job
        for update in updates:
            self._first.append(self._first[-1] + len(update["jobs"]))

    def publish(self, version: int) -> None:
        self.version, self.place = version, 0
        self.missing = len(self.updates[version]["jobs"])
        self.sent += self.updates[version]["sent"]
        self.clock.now = self.updates[version]["seconds"]
        for position, place in self._of_version.get(version, ()):
            row, number = self.updates[position]["jobs"][place], self._first[position] + place
            _, _, lr = self.work(row["client"], version)
            self.jobs[number] = Job(
                row["client"], version, row["repeat"], row["target"], row["steps"], lr, row["start"], row["end"], False
            )
            queue = self.queues.setdefault(row["client"], [])
            queue.append(number)
            queue.sort()
        for queue in self.queues.values():
            self.needed.setdefault(queue[0], None)  # a client's next job builds on the memory of the one before

    def refuse(self, count: int) -> None:
        """The trace says who was used; nobody comes in their place."""

    def times(self, number: int) -> int:
        position = self.version
        return self.updates[position]["jobs"][number - self._first[position]]["times"]

    def advance(self) -> int:
        number = self._first[self.version] + self.place
        self.place, self.missing = self.place + 1, self.missing - 1
        self.needed.pop(number, None)
        return number

    def release(self, number: int) -> None:
        client = self.jobs[number].client
        super().release(number)
        self.queues[client].remove(number)
        if not self.queues[client]:
            del self.queues[client]
        elif self.queues[client][0] >= self._first[self.version] + self.place:  # it has not reached the server yet
            self.needed[self.queues[client][0]] = None
