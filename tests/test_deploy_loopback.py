"""Real Flower processes over loopback: link, executor, nodes, run."""

import json
import subprocess

import pytest
import safetensors.torch
import torch
from problems import flower_description, simulated

pytest.importorskip("flwr", reason="flwr is not installed: pip install fedstride[deploy]")

from fedstride.deploy.local import Stack  # noqa: E402
from fedstride.timeline import Timeline  # noqa: E402


def outcome(folder):
    """Model, rows and timeline that the server left on disk."""
    (path,) = folder.glob("tensors-*-finished.safetensors")
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    timeline = Timeline()
    timeline.load([json.loads(line) for line in (folder / "timeline.jsonl").read_text().splitlines()])
    return safetensors.torch.load_file(path)["state.0"], rows, timeline


def test_a_synchronous_and_an_asynchronous_run_equal_their_simulations(tmp_path):
    said = []
    with Stack(tmp_path, 2) as stack:
        for method in ("scaffold", "fedbuff"):
            experiment = flower_description(method, clients=2, rounds=2)
            stack.run(experiment, method, folder=tmp_path / method, timeout=120, watch=said.append)
            x, rows, timeline = outcome(tmp_path / method)
            assert [row["round"] for row in rows] == [1, 2], "\n".join(said)
            trace = timeline.trace() if method == "fedbuff" else None
            torch.testing.assert_close(x, simulated(experiment, trace).x, rtol=1e-9, atol=1e-11)
    left = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True).stdout
    assert not left, f"processes {left} are still there"
