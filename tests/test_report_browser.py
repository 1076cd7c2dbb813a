"""The page in a real browser: headless Chromium, where it and selenium are installed."""

import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest
from sample_study import study

from fedstride import report
from fedstride.report import figures

pytest.importorskip("selenium", reason="selenium is not installed, so the page is not opened in a browser")
if not Path("/usr/bin/chromedriver").exists() or not shutil.which("chromium"):
    pytest.skip("Chromium and its driver are not installed, so the page is not opened", allow_module_level=True)

from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402

SCRIPT = Path(__file__).parent.parent / "docs" / "screenshot.py"
spec = importlib.util.spec_from_file_location("screenshot", SCRIPT)
screenshot = importlib.util.module_from_spec(spec)
spec.loader.exec_module(screenshot)


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    driver = screenshot.browser(str(tmp_path_factory.mktemp("profile")))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "draw", lambda data, findings: {})
        return report.write(study(tmp_path_factory.mktemp("study") / "demo"))


@pytest.fixture
def page(driver, path):
    """The page at desktop width, freshly opened; whatever it does, the console stays silent."""
    screenshot.show(driver, path)
    yield driver
    assert driver.get_log("browser") == []


def one(driver, selector):
    return driver.find_element(By.CSS_SELECTOR, selector)


def all_of(driver, selector):
    return driver.find_elements(By.CSS_SELECTOR, selector)


def test_every_section_is_drawn(page):
    for name in ("curves", "timelines", "steps", "partition", "fairness"):
        assert one(page, f"#{name} .draw svg").size["height"] > 100, name
    assert len(all_of(page, "#staleness svg")) == 1
    for svg in all_of(page, "figure svg"):
        assert svg.get_attribute("aria-label")


def test_the_axis_switches(page):
    def drawn():
        return one(page, "#curves .xlabel").text, one(page, "#curves g[data-label=fedavg] .line").get_attribute(
            "points"
        )

    seen = set()
    for unit, label in (
        ("rounds", "round"),
        ("seconds", "virtual seconds"),
        ("megabytes", "megabytes up and down"),
        ("steps", "client steps"),
    ):
        one(page, f"#curves [data-value={unit}]").click()
        said, points = drawn()
        assert said == label
        seen.add(points)
    assert len(seen) == 4
    one(page, "#curves [data-value=train_loss]").click()
    assert one(page, "#curves .ylabel").text == "train loss"


def test_hovering_shows_the_right_numbers(page, path):
    one(page, "#curves [data-value=rounds]").click()
    area = one(page, "#curves .over")
    ActionChains(page).move_to_element_with_offset(area, -area.size["width"] // 2 + 30, 0).perform()
    tip = one(page, ".tip")
    place = int(re.match(r"round (\d+)", tip.text).group(1))
    data = json.loads(one(page, "#data").get_attribute("textContent"))
    line = data["curves"]["accuracy"]["rounds"]["fedavg"]
    k = line["x"].index(place)
    said = f"{100 * line['mean'][k]:.1f} ± {100 * line['half'][k]:.1f} %"
    rows = {row.text.split("\n")[0]: row.text.split("\n")[1] for row in all_of(page, ".tip div")}
    assert rows["fedavg"] == said
    ActionChains(page).move_to_element(one(page, "h1")).perform()
    assert not tip.is_displayed()


def test_a_job_of_the_timeline_explains_itself(page):
    ActionChains(page).move_to_element(one(page, "#timelines .job")).perform()
    assert "client" in one(page, ".tip").text and "fate" in one(page, ".tip").text


def test_the_legend_hides_and_shows(page):
    one(page, ".legend [data-label=fedavg]").click()
    assert not all_of(page, "#curves g[data-label=fedavg]")
    assert one(page, ".legend [data-label=fedavg]").get_attribute("aria-pressed") == "false"
    one(page, ".legend [data-label=fedavg]").click()
    assert all_of(page, "#curves g[data-label=fedavg]")
    for button in all_of(page, ".legend button"):
        button.click()
    assert not all_of(page, "#curves g.method")


def test_the_table_sorts(page):
    def column(k):
        return [float(cell.get_attribute("data-value")) for cell in all_of(page, f"tbody tr > :nth-child({k})")]

    head = all_of(page, "thead tr:last-child th")[3]
    head.find_element(By.CSS_SELECTOR, "button").click()
    assert head.get_attribute("aria-sort") == "ascending" and column(4) == sorted(column(4))
    head.find_element(By.CSS_SELECTOR, "button").click()
    assert head.get_attribute("aria-sort") == "descending" and column(4) == sorted(column(4), reverse=True)
    all_of(page, "thead button")[0].click()
    labels = [cell.text for cell in all_of(page, "tbody th")]
    assert labels == sorted(labels)


def test_another_method_can_be_chosen(page):
    before = one(page, "#steps svg").get_attribute("aria-label")
    for option in all_of(page, "#steps option"):
        if option.get_attribute("value") not in before:
            option.click()
            break
    assert one(page, "#steps svg").get_attribute("aria-label") != before


def test_dark_mode(driver, path):
    colours = []
    for theme in ("light", "dark"):
        screenshot.show(driver, path, theme=theme)
        colours.append(driver.execute_script("return getComputedStyle(document.body).backgroundColor"))
    assert colours == ["rgb(255, 255, 255)", "rgb(20, 23, 27)"]


@pytest.mark.parametrize("width", [390, 768, 1280])
def test_the_page_never_scrolls_sideways(driver, path, width):
    screenshot.show(driver, path, width)
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    assert driver.get_log("browser") == []
