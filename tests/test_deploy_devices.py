"""Deployment: slow devices, late replies, crafted payloads, data of one's own, and the page at the end."""

import io
import os
from functools import partial

import numpy as np
import pytest
import torch
from problems import flower_description

import fedstride as fs

pytest.importorskip("flwr", reason="flwr is not installed: pip install fedstride[deploy]")
from flwr.app import Array, ArrayRecord  # noqa: E402
from standin import Standin, quick  # noqa: E402, F401

from fedstride import report, runs  # noqa: E402
from fedstride.deploy import apps  # noqa: E402
from fedstride.deploy.server import serve  # noqa: E402

CLIENTS = 4
description = partial(flower_description, clients=CLIENTS)


def test_a_slow_device_returns_what_it_has_done_and_fedlga_makes_up_for_it(tmp_path):
    experiment = description("fedlga", steps=[2, 10**6, 3, 2], schedule={"name": "deadline", "seconds": 0.2}, rounds=2)
    over = serve(experiment, Standin(experiment, CLIENTS, tmp_path / "nodes"), tmp_path / "run", "test", CLIENTS)
    slow = [job for job in over.timeline.jobs if job["client"] == 1]
    assert all(1 <= job["steps"] < job["target"] == 10**6 for job in slow)
    assert all(job["steps"] == job["target"] for job in over.timeline.jobs if job["client"] != 1)
    assert [row["unfinished"] for row in over.rows] == [1, 1]
    method, model, clients, _, settings = experiment.prepare(real=True)
    settings |= {"schedule": fs.schedule.Replay(over.timeline.trace())}  # steps asked for and steps done
    torch.testing.assert_close(over.x, fs.simulate(method, model, clients, **settings).x, rtol=1e-9, atol=1e-11)


def test_a_slow_device_returns_what_it_has_done_and_fedagrac_counts_its_steps(tmp_path):
    # Small steps: how many the slow device takes depends on the machine, and hundreds of large ones amplify rounding.
    steps, deadline = [2, 10**6, 3, 2], {"name": "deadline", "seconds": 0.2}
    experiment = description("fedagrac", steps=steps, schedule=deadline, lr=0.002)
    over = serve(experiment, Standin(experiment, CLIENTS, tmp_path / "nodes"), tmp_path / "run", "test", CLIENTS)
    trained = [job for job in over.timeline.jobs if job["exchange"] == "train"]
    assert all(job["steps"] < job["target"] for job in trained if job["client"] == 1)
    done = np.zeros((3, CLIENTS), dtype=int)
    for job in trained:
        done[job["update"] - 1, job["client"]] = job["steps"]
    method, model, clients, _, settings = experiment.prepare(real=True)
    settings |= {"steps": done, "schedule": fs.schedule.Sync()}
    torch.testing.assert_close(over.x, fs.simulate(method, model, clients, **settings).x, rtol=1e-9, atol=1e-11)


class Slow(Standin):
    """Client 2 answers its first job when everybody is at the third round, if it is asked for then."""

    def pull_messages(self, numbers):
        late = [n for n, m in self.waiting.items() if m.metadata.dst_node_id == 102 and m.metadata.group_id == "0"]
        late = [n for n in late if self.waiting[n].metadata.message_type == "train"]
        if late and any(message.metadata.group_id == "2" for message in self.waiting.values()):
            self.late = self._answer(late[0])  # trains and answers, too late
        return super().pull_messages([number for number in numbers if number not in late])


def test_a_late_reply_is_not_used_and_leaves_the_memory_as_it_was(tmp_path, capsys):
    experiment = description("scaffold", rounds=4)
    grid = Slow(experiment, CLIENTS, tmp_path / "nodes")
    over = serve(experiment, grid, tmp_path / "run", "test", CLIENTS, timeout=0.5)
    assert [row["clients"] for row in over.rows] == [3, 4, 4, 4] and grid.late
    assert "clients [2] have not answered for 0.5 s" in capsys.readouterr().err
    method, model, clients, _, settings = experiment.prepare()
    cohorts = [[0, 1, 3], *[[0, 1, 2, 3]] * 3]
    alone = fs.simulate(method, model, clients, **settings | {"participation": cohorts})
    torch.testing.assert_close(over.x, alone.x, rtol=1e-9, atol=1e-11)


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_crafted_pickle_is_refused_and_not_opened(tmp_path, capsys):
    experiment, seen = description("fedavg"), []
    payload = io.BytesIO()
    np.save(payload, np.array([Trap(tmp_path / "opened")], dtype=object), allow_pickle=True)

    def spoil(grid, message, reply):
        if message.metadata.message_type == "train":
            seen.append(message)
        if message.metadata.message_type == "train" and len(seen) == 2:
            bad = Array(dtype="object", shape=(1,), stype="numpy.ndarray", data=payload.getvalue())
            reply.content["vectors"] = ArrayRecord({"dx": bad})
        return [reply]

    grid = Standin(experiment, CLIENTS, tmp_path / "nodes", spoil=spoil)
    over = serve(experiment, grid, tmp_path / "run", "test", CLIENTS, timeout=60.0)
    assert [row["rejected"] for row in over.rows] == [1, 0, 0] and not (tmp_path / "opened").exists()
    assert "Object arrays cannot be loaded" in capsys.readouterr().err


def test_a_clients_data_come_from_a_function_of_its_own(tmp_path):
    (tmp_path / "sensors.py").write_text(
        "import numpy as np\n\n\ndef load():\n    return np.ones((3, 2)), np.array([0, 1, 0])\n"
    )
    inputs, targets = apps.read(str(tmp_path / "sensors.py"))
    assert inputs.shape == (3, 2) and targets.tolist() == [0, 1, 0]
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(fs.FedstrideError, match="empty.py has no function load"):
        apps.read(str(tmp_path / "empty.py"))
    (tmp_path / "wrong.py").write_text("def load():\n    return 1 / 0\n")
    with pytest.raises(fs.FedstrideError, match="wrong.py: load.. failed: ZeroDivisionError"):
        apps.read(str(tmp_path / "wrong.py"))


@pytest.mark.parametrize("own", [False, True])
def test_the_page_at_the_end_has_wall_clock_seconds_and_the_pictures(own, tmp_path):
    experiment = description("fedbuff", rounds=4)
    fleet, _, names = experiment.fleet()
    grid = Standin(experiment.settled(len(names)), CLIENTS, tmp_path / "nodes")
    if own:
        np.savez(tmp_path / "mine.npz", **dict(zip(("inputs", "targets"), (part.numpy() for part in fleet.data(1)))))
        grid.contexts[101].node_config["data"] = str(tmp_path / "mine.npz")
    folder = tmp_path / "out" / "fedbuff" / "seed-0"
    serve(experiment, grid, folder, "test", CLIENTS, timeout=60.0)
    (record,) = runs.load(tmp_path / "out")
    assert record.clock == "wall-clock" and record.clients["sizes"] == fleet.sizes.tolist()
    assert ("counts" in record.clients) != own  # what strangers hold, nobody here knows
    page = report.write(tmp_path / "out").read_text()
    assert '"clock":"wall-clock"' in page and "virtual seconds" not in page
    sections = {name: f'<section id="{name}">' in page for name in ("curves", "timelines", "partition", "fairness")}
    assert sections == {"curves": True, "timelines": True, "partition": not own, "fairness": not own}
    assert "wall-clock seconds" in (tmp_path / "out" / "figures" / "timeline.svg").read_text()


def test_a_world_is_said_not_to_be_used(tmp_path, capsys):
    experiment = description("fedavg", world={"devices": 0.01}, rounds=1)
    serve(experiment, Standin(experiment, CLIENTS, tmp_path / "nodes"), tmp_path / "run", "test", CLIENTS, timeout=60.0)
    assert "the experiment's world is not used" in capsys.readouterr().err
