"""Real Flower processes over loopback that are killed, stopped and started again, and the example for small devices."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from problems import flower_description, simulated

import fedstride as fs

pytest.importorskip("flwr", reason="flwr is not installed: pip install fedstride[deploy]")
from test_deploy_loopback import outcome, replayed  # noqa: E402

from fedstride.deploy import keys  # noqa: E402
from fedstride.deploy import stack as programs  # noqa: E402
from fedstride.deploy.stack import Stack  # noqa: E402

EXAMPLE = Path(__file__).parents[1] / "examples" / "raspberry"


def at_round(number, act, said):
    """Watch a run and do something once, when a round is over."""

    def watch(line):
        said.append(line)
        if line.startswith(f'{{"round": {number},'):
            act()

    return watch


@pytest.mark.slow
def test_a_killed_server_goes_on_where_it_was(tmp_path):
    experiment, said = flower_description("scaffold", clients=2, rounds=4), []
    with Stack(tmp_path / "stack", 2) as stack:
        stack.start(0)
        stack.start(1)

        def kill():
            program = f"flwr-serverapp --runtime-api-address 127.0.0.1:{stack.port}"
            found = subprocess.run(["pgrep", "-f", program], capture_output=True, text=True, check=True).stdout
            os.kill(int(found.split()[0]), signal.SIGKILL)

        stack.run(experiment, "kill", tmp_path / "run", timeout=120, watch=at_round(2, kill, said))
        assert not list((tmp_path / "run").glob("tensors-*-finished.safetensors")), "\n".join(said)
        stack.run(experiment, "kill", tmp_path / "run", timeout=120, watch=said.append)
    x, rows, _ = outcome(tmp_path / "run")
    assert [(row["round"], row["clients"]) for row in rows] == [(n, 2) for n in range(1, 5)], "\n".join(said)
    torch.testing.assert_close(x, simulated(experiment).x, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_when_the_link_is_killed_the_run_says_so_and_goes_on_with_the_same_nodes(tmp_path):
    keys.write(tmp_path / "keys", 2, ["127.0.0.1"])
    experiment, said, port = flower_description("scaffold", clients=2, rounds=4), [], programs.port()
    with ExitStack() as nodes:
        with Stack(tmp_path / "stack", 2, at=port, keys=tmp_path / "keys") as stack:
            for number in range(2):
                command = programs.node(f"127.0.0.1:{port}", number, tmp_path / "memory", None, tmp_path / "keys")
                (tmp_path / str(number)).mkdir()
                nodes.enter_context(programs.process("node", command, tmp_path / str(number)))
            kill = stack.processes["link"].kill
            with pytest.raises(fs.FedstrideError, match="Flower's link has died"):
                stack.run(experiment, "kill", tmp_path / "run", timeout=120, watch=at_round(2, kill, said))
        with Stack(tmp_path / "stack", 2, at=port, keys=tmp_path / "keys") as stack:
            stack.run(experiment, "kill", tmp_path / "run", timeout=120, watch=said.append)
    x, rows, _ = outcome(tmp_path / "run")
    assert [(row["round"], row["clients"]) for row in rows] == [(n, 2) for n in range(1, 5)], "\n".join(said)
    torch.testing.assert_close(x, simulated(experiment).x, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_a_node_cut_off_for_a_minute_is_missed_and_takes_part_again(tmp_path):
    experiment, said = flower_description("scaffold", clients=2, rounds=14), []
    with Stack(tmp_path / "stack", 2) as stack:
        stack.start(0)
        stack.start(1)
        node = stack.processes["node-1"].pid

        def stop():
            os.killpg(node, signal.SIGSTOP)
            threading.Timer(60, os.killpg, (node, signal.SIGCONT)).start()

        stack.run(experiment, "cut", tmp_path / "run", timeout=100, watch=at_round(2, stop, said))
    x, rows, timeline = outcome(tmp_path / "run")
    counts = [row["clients"] for row in rows]
    assert len(counts) == 14 and counts[:2] == [2, 2] and 1 in counts and counts[-1] == 2, "\n".join(said)
    torch.testing.assert_close(x, replayed(experiment, timeline).x, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_a_node_that_is_killed_and_started_again_without_a_key_goes_on_with_its_memory(tmp_path):
    experiment, said = flower_description("scaffold", clients=2, rounds=16), []
    with Stack(tmp_path / "stack", 2) as stack:
        stack.start(0)
        stack.start(1)

        def again():
            os.killpg(stack.processes["node-1"].pid, signal.SIGKILL)
            stack.start(1)

        stack.run(experiment, "again", tmp_path / "run", timeout=120, watch=at_round(2, again, said))
    x, rows, timeline = outcome(tmp_path / "run")
    assert [row["round"] for row in rows] == list(range(1, 17)) and rows[-1]["clients"] == 2, "\n".join(said)
    torch.testing.assert_close(x, replayed(experiment, timeline).x, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_a_command_that_is_ended_leaves_nothing_running_and_goes_on_when_it_is_started_again(tmp_path):
    settings = ["partition.clients=2", "model.hidden=8", "rounds=3", "steps=2", "--out", str(tmp_path / "out")]
    command = [sys.executable, "-m", "fedstride.cli", "deploy", "local", *settings]
    home = os.environ | {"PYTHONPATH": str(EXAMPLE.parents[1])}
    with subprocess.Popen(command, env=home, stderr=subprocess.PIPE, text=True) as first:
        for line in first.stderr:
            if line.startswith("round 1/3"):
                first.terminate()
    assert first.returncode == 143
    left = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True).stdout
    assert not left, f"processes {left} are still there"
    again = subprocess.run(command, env=home, capture_output=True, text=True)
    assert again.returncode == 0 and "round 1/3" not in again.stderr, again.stderr
    assert "wall-clock s" in again.stdout and "report: " in again.stdout
    rows = (tmp_path / "out" / "fedavg" / "seed-0" / "rows.jsonl").read_text().splitlines()
    assert [json.loads(row)["round"] for row in rows] == [1, 2, 3]


def commands(text, devices):
    """The commands of the example's README, for fewer devices on this machine."""
    blocks = "\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL))
    blocks = blocks.replace("192.168.1.10", "127.0.0.1").replace("0.0.0.0", "127.0.0.1")
    numbers = " ".join(map(str, range(devices)))
    return (
        blocks.replace("0 1 2 3 4", numbers)
        .replace("--clients 5", f"--clients {devices}")
        .replace("devices 5", f"devices {devices}")
    )


@pytest.mark.slow
def test_what_the_example_for_small_devices_says_works_on_this_machine(tmp_path):
    place, bin = tmp_path / "raspberry", tmp_path / "bin"
    bin.mkdir()
    subprocess.run(["cp", "-r", str(EXAMPLE), str(place)], check=True)
    (bin / "fedstride").write_text(f'#!/bin/sh\nexec {sys.executable} -m fedstride.cli "$@"\n')
    (bin / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    for name in ("fedstride", "python"):
        (bin / name).chmod(0o755)
    home = programs.environment(tmp_path / "home")
    home |= {"PATH": f"{bin}{os.pathsep}{home['PATH']}", "PYTHONPATH": str(EXAMPLE.parents[1])}
    text, port = (EXAMPLE / "README.md").read_text(), programs.port()
    script = commands(text, 2).replace("9092", str(port))
    script = re.sub(r"^(python3|~/venv|\. ~/venv|cd|sudo|    scp).*\n", "", script, flags=re.MULTILINE)
    before, server, after = script.partition("fedstride deploy server")
    arguments, client = after.split("\n", 1)
    assert client.strip() == "sh fedstride/client.sh"
    subprocess.run(["sh", "-e", "-c", before], cwd=place, env=home, check=True)
    assert (place / "devices" / "0" / "node-0").stat().st_mode & 0o077 == 0
    short = f" --port {port} rounds=2 steps=5"
    with ExitStack() as devices:
        for number in range(2):
            log = open(tmp_path / f"device-{number}.log", "w")
            device = subprocess.Popen(
                ["sh", "client.sh"], cwd=place / "devices" / str(number), env=home, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
            devices.callback(os.killpg, device.pid, signal.SIGKILL)
        done = subprocess.run(
            ["sh", "-c", server + arguments + short], cwd=place, env=home, capture_output=True, text=True
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "round 2/2: 2 clients" in done.stderr and "report: runs/deploy/report.html" in done.stdout
    assert "wall-clock" in (place / "runs" / "deploy" / "report.html").read_text()
