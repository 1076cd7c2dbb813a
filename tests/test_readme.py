"""What the README says is run."""

import contextlib
import io
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_python_example():
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(block, "README.md", "exec"), {})
    assert "fedagrac finished after 50 rounds" in said.getvalue()


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
