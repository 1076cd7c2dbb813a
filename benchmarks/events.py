"""The cost of time itself: events a second of queue and schedule alone, nothing trained, from 1e3 to 1e5 clients.

    python benchmarks/events.py

Half a million jobs at 1e5 clients, 200,000 below; an event is whatever the clock hands out. One core.
"""

import time

import numpy as np

import fedstride as fs
from fedstride.courses import Course
from fedstride.world import Pace


def steps(client: int, version: int) -> tuple[int, int, float]:
    return 10, 10, 0.1


def play(schedule: fs.schedule.Schedule, clients: int, jobs: int) -> tuple[int, float]:
    """Events and seconds of a course in which the server acts until the fleet has started so many jobs."""
    world = fs.World(devices=fs.devices.slowdown(0.01, 1, 5), links=fs.links.bandwidth(1e8, latency=0.02))
    costs = Pace(world, clients, 0).costs(2e6, 2e6, np.zeros(clients, dtype=np.int64))
    course: Course = schedule.course(costs, steps, 0, 0.0)
    version, events = 0, 0
    pop = course.clock.pop

    def counted() -> tuple:
        nonlocal events
        events += 1
        return pop()

    course.clock.pop = counted  # type: ignore[method-assign]
    start = time.perf_counter()
    while course.started < jobs:
        course.publish(version)
        while not course.closed:
            number = course.advance()
            assert number is not None
            course.release(number)
        course.gone.clear()
        version += 1
    return events, time.perf_counter() - start


def main() -> None:
    print(f"{'schedule':<16}" + "".join(f"{count:>18,}" for count in (1_000, 10_000, 100_000)) + "   clients")
    for name in ("Buffered", "FirstArrivals", "SendBuffers"):
        cells = []
        for count in (1_000, 10_000, 100_000):
            n = count // 20
            schedule: fs.schedule.Schedule = {
                "Buffered": fs.schedule.Buffered(concurrency=count // 2, size=n),
                "FirstArrivals": fs.schedule.FirstArrivals(n),
                "SendBuffers": fs.schedule.SendBuffers(n),
            }[name]
            events, seconds = play(schedule, count, max(5 * count, 200_000))
            cells.append(events / seconds)
        print(
            f"{name:<16}"
            + "".join(f"{rate:>12,.0f} ev/s" for rate in cells)
            + f"   1e5 at {cells[2] / cells[0]:.2f} of 1e3"
        )


if __name__ == "__main__":
    main()
