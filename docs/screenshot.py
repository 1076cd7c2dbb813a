"""A picture of a report page, taken by headless Chromium.

usage: screenshot.py FOLDER [TARGET.png [WIDTH [light|dark [SECTION]]]]

The picture is of the whole page, or ends after the section (such as timelines).
"""

import base64
import sys
import tempfile
from pathlib import Path

from selenium import webdriver

FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking \
--disable-component-update --disable-sync --hide-scrollbars"


def browser(profile: str) -> webdriver.Chrome:
    """A headless Chromium with a profile of its own."""
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for flag in [*FLAGS.split(), f"--user-data-dir={profile}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options, webdriver.ChromeService("/usr/bin/chromedriver"))


def show(driver: webdriver.Chrome, page: Path, width: int = 1280, theme: str = "light") -> dict:
    """Open the page on a screen of this width; under 500 pixels it is a phone's."""
    feature = [{"name": "prefers-color-scheme", "value": theme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": feature})
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    driver.get(page.resolve().as_uri())
    return size


def picture(driver: webdriver.Chrome, page: Path, width: int = 1280, theme: str = "light", until: str = "") -> bytes:
    """The page as PNG: all of it, or up to the end of a section."""
    size = show(driver, page, width, theme)
    end = "const end = document.getElementById(arguments[0]); const all = document.documentElement;"
    end += "return end ? Math.ceil(end.getBoundingClientRect().bottom) + 32 : all.scrollHeight"
    size["height"] = driver.execute_script(end, until)
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    shot = driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": False})
    return base64.b64decode(shot["data"])


def main(
    folder: str, target: str = "docs/report.png", width: str = "1280", theme: str = "light", until: str = ""
) -> None:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        driver = browser(profile)
        try:
            Path(target).write_bytes(picture(driver, Path(folder) / "report.html", int(width), theme, until))
        finally:
            driver.quit()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(*sys.argv[1:])
