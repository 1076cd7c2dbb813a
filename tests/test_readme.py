"""What the README says is run."""

import contextlib
import io
import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_python_example():
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(block, "README.md", "exec"), {})
    assert "fedagrac finished after 50 rounds" in said.getvalue()


def test_the_commands(tmp_path, monkeypatch, capsys):
    """Every `fedstride ...` line of the README and of docs/experiments.md, on less work."""
    from fedstride import cli

    pages = (ROOT / "README.md").read_text() + (ROOT / "docs" / "experiments.md").read_text()
    lines = [line.split(" #")[0] for line in pages.splitlines() if line.startswith("fedstride ")]
    lines = list(dict.fromkeys(lines))
    assert len(lines) >= 7
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    toml = re.search(r"```toml\n# skewed.toml\n(.*?)```", pages, re.DOTALL)
    (tmp_path / "skewed.toml").write_text(toml.group(1))
    monkeypatch.chdir(tmp_path)
    for line in lines:
        words = shlex.split(line)
        if words[1] in ("run", "compare", "sweep"):
            less = ["seconds=0.4"] if "demo" in line else ["rounds=2"]
            words = [word for word in words if not word.startswith("rounds=")] + less
            words = [*words, "--seeds", "1"]
        if words[1] == "reproduce" and "--list" not in words:
            words = ["fedstride", "reproduce", "o1t/figure2", "--scale", "smoke"]
        monkeypatch.setattr("sys.argv", words)
        with contextlib.suppress(SystemExit):
            cli.main()
        said = capsys.readouterr()
        assert "error" not in said.err, f"{line}: {said.err}"


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(
        r"`?make ([a-z-]+)", (ROOT / "README.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    ):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target} is promised but not there"


def test_links_lead_somewhere():
    for page in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]:
        for link in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"
