"""A headless Chromium on the playground. Where there is none, tests that need it are skipped."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

# text on what lies behind it, by the formula of WCAG 2; a canvas turns any colour into sRGB
CONTRAST = """
const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
const sRGB = (colour) => {
  context.clearRect(0, 0, 1, 1);
  context.fillStyle = colour;
  context.fillRect(0, 0, 1, 1);
  return [...context.getImageData(0, 0, 1, 1).data];
};
const light = (colour) => sRGB(colour).slice(0, 3).map((value) => value / 255)
  .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4))
  .reduce((total, value, index) => total + value * [0.2126, 0.7152, 0.0722][index], 0);
const behind = (element) => {
  const colour = getComputedStyle(element).backgroundColor;
  return sRGB(colour)[3] === 255 ? colour : behind(element.parentElement);
};
const [high, low] = (element => [light(getComputedStyle(element).color), light(behind(element))])(
  document.querySelector(arguments[0])).sort((a, b) => b - a);
return (high + 0.05) / (low + 0.05);"""


@contextmanager
def open_browser() -> Iterator["Browser"]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="the playground's page is tested with selenium")
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("no Chromium here: install chromium and chromium-driver to test the playground's page")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for argument in ("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--no-proxy-server"):
        options.add_argument(argument)
    if os.geteuid() == 0:  # the sandbox refuses to be run by root
        options.add_argument("--no-sandbox")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(options, webdriver.ChromeService(driver))
    try:
        yield Browser(chrome)
    finally:
        chrome.quit()


class Browser:
    def __init__(self, chrome: Any) -> None:
        self.chrome = chrome

    def open(self, url: str, width: int = 1280, height: int = 800) -> None:
        """A fresh tab's state: no key, no settings."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.chrome.get(url)
        self.run("sessionStorage.clear()")
        self.chrome.get(url)
        self.chrome.get_log("browser")

    def run(self, script: str, *arguments: Any) -> Any:
        return self.chrome.execute_script(script, *arguments)

    def find(self, selector: str) -> Any:
        return self.chrome.find_element("css selector", selector)

    def text(self, selector: str) -> str:
        return self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector)

    def keys(self, *keys: str) -> None:
        """To whatever has the focus."""
        self.chrome.switch_to.active_element.send_keys(*keys)

    def focused(self) -> str:
        return self.run("return document.activeElement.id || document.activeElement.textContent")

    def wait(self, condition: Callable[[], Any], seconds: float = 20.0) -> Any:
        end = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < end, f"waited in vain; the page says: {self.text('body')}"
            time.sleep(0.02)
        return found

    def is_shown(self, selector: str) -> bool:
        return self.run("return document.querySelector(arguments[0])?.checkVisibility() ?? false", selector)

    def style(self, selector: str, name: str) -> str:
        return self.run("return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]", selector, name)

    def contrast(self, selector: str) -> float:
        return self.run(CONTRAST, selector)

    def complaints(self) -> list[str]:
        """What the console got since the page was opened, but for requests that the server refused."""
        found = [entry["message"] for entry in self.chrome.get_log("browser") if entry["level"] == "SEVERE"]
        return [message for message in found if "Failed to load resource" not in message]
