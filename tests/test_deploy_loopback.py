"""Real Flower processes over loopback: link, executor, nodes, run."""

import json
import os
import signal
import subprocess

import pytest
import safetensors.torch
import torch
from problems import flower_description, simulated

import fedstride as fs
from fedstride.algorithm import REGISTRY

pytest.importorskip("flwr", reason="flwr is not installed: pip install fedstride[deploy]")

from fedstride.deploy import keys  # noqa: E402
from fedstride.deploy import stack as programs
from fedstride.deploy.stack import Stack  # noqa: E402
from fedstride.timeline import Timeline  # noqa: E402

METHODS = [name for name, method in sorted(REGISTRY.items()) if not method.pooled]


def outcome(folder):
    """Model, rows and timeline that the server left on disk."""
    (path,) = folder.glob("tensors-*-finished.safetensors")
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    timeline = Timeline()
    timeline.load([json.loads(line) for line in (folder / "timeline.jsonl").read_text().splitlines()])
    return safetensors.torch.load_file(path)["state.0"], rows, timeline


def replayed(experiment, timeline):
    """The same in the simulator: in the order of the trace, or with the cohorts that there were."""
    method, model, clients, _, settings = experiment.prepare()
    if method.schedule.asynchronous:
        return simulated(experiment, timeline.trace())
    used = [job for job in timeline.jobs if job["fate"] == "used" and job["exchange"] == "train"]
    rounds = range(1, experiment.rounds + 1)
    cohorts = [sorted(job["client"] for job in used if job["update"] == number) for number in rounds]
    return fs.simulate(method, model, clients, **settings | ({} if method.full_only else {"participation": cohorts}))


def test_a_run_over_real_processes_equals_its_simulation(tmp_path):
    """With memories on the nodes; the slow test below has all methods, asynchronous ones among them."""
    experiment, said = flower_description("scaffold", clients=2, rounds=2), []
    with Stack(tmp_path, 2) as stack:
        stack.start(0)
        stack.start(1)
        stack.run(experiment, "scaffold", folder=tmp_path / "run", timeout=120, watch=said.append)
        x, rows, _ = outcome(tmp_path / "run")
        assert [row["round"] for row in rows] == [1, 2], "\n".join(said)
        torch.testing.assert_close(x, simulated(experiment).x, rtol=1e-9, atol=1e-11)
    left = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True).stdout
    assert not left, f"processes {left} are still there"


@pytest.mark.slow
def test_every_method_over_real_processes_equals_its_simulation(tmp_path):
    far = {}
    with Stack(tmp_path, 2) as stack:
        stack.start(0)
        stack.start(1)
        for method in METHODS:
            experiment = flower_description(method, clients=2, rounds=2)
            stack.run(experiment, method, folder=tmp_path / method, timeout=120)
            x, rows, timeline = outcome(tmp_path / method)
            alone = replayed(experiment, timeline)
            far[method] = float((x - alone.x).norm() / alone.x.norm())
            print(f"| {method} | {rows[-1]['round']} | {far[method]:.1e} |", flush=True)  # pytest -s shows the table
    assert max(far.values()) < 1e-9 and len(far) == len(METHODS), far


@pytest.mark.slow
def test_strangers_are_refused_and_the_run_goes_on(tmp_path):
    keys.write(tmp_path / "keys", 2, ["127.0.0.1", "localhost"])
    keys.write(tmp_path / "others", 1, ["127.0.0.1"])  # another authority, another node's key
    experiment, said = flower_description("scaffold", clients=2, rounds=2), []
    (tmp_path / "mixed").mkdir()
    for name, source in (("ca.crt", "keys"), ("node-0", "others")):
        (tmp_path / "mixed" / name).write_bytes((tmp_path / source / name).read_bytes())
    with Stack(tmp_path / "stack", 2, keys=tmp_path / "keys") as stack:
        stack.start(0)
        stack.start(1)
        server, flags = f"127.0.0.1:{stack.port}", "--auth-supernode-private-key"
        commands = {
            "plain": programs.node(server, 0, tmp_path / "plain", None, None),
            "wrong key": programs.node(server, 0, tmp_path / "wrong", None, tmp_path / "mixed"),
            "wrong authority": programs.node(server, 0, tmp_path / "other", None, tmp_path / "others"),
            "no key": programs.node(server, 0, tmp_path / "none", None, tmp_path / "keys"),
        }
        place = commands["no key"].index(flags)
        del commands["no key"][place : place + 2]
        home = programs.environment(tmp_path / "home")
        strangers = {name: subprocess.Popen(command, env=home) for name, command in commands.items()}
        stack.run(experiment, "tls", tmp_path / "run", timeout=180, watch=said.append)
        for stranger in strangers.values():  # refused they end, or try to connect for ever
            stranger.kill()
            assert stranger.wait(30) != 0
    x, rows, _ = outcome(tmp_path / "run")
    assert [row["clients"] for row in rows] == [2, 2], "\n".join(said)
    torch.testing.assert_close(x, simulated(experiment).x, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_a_node_that_is_killed_is_missed_and_comes_back(tmp_path):
    experiment, said = flower_description("scaffold", clients=3, rounds=8), []
    with Stack(tmp_path / "stack", 3) as stack:
        for number in range(3):
            stack.start(number)

        def watch(line):
            said.append(line)
            if line.startswith('{"round": 2,'):
                os.killpg(stack.processes["node-1"].pid, signal.SIGKILL)

        stack.run(experiment, "kill", tmp_path / "run", timeout=60, watch=watch)
    x, rows, timeline = outcome(tmp_path / "run")
    assert [row["round"] for row in rows] == list(range(1, 9)), "\n".join(said)
    assert rows[1]["clients"] == 3 and rows[-1]["clients"] == 2
    torch.testing.assert_close(x, replayed(experiment, timeline).x, rtol=1e-9, atol=1e-11)
