"""The chat page, in a real browser where there is one (Debian: chromium and chromium-driver)."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait
from tests.server.live import PATIENCE, answer, call, chat_format, live, wire

from musespark.engine.client import EngineRequest

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(
    BROWSER is None or DRIVER is None,
    reason="needs a browser: apt-get install chromium chromium-driver",
)
# Where to leave screenshots for people, if anywhere.
SCREENSHOTS = os.environ.get("MUSESPARK_SCREENSHOTS")

CAREFUL = "carefully now, step by step, " * 8
EVIL = '<img src=x onerror="document.title=1"> **bold** `<script>document.title=2</script>`'
TOOL_TURN = (
    " to=self<|message|>a sum<|eom|><|start|>assistant" + call("add", a="1", b="2") + "<|eot|>"
)


def script(request: EngineRequest, _index: int) -> list[int]:
    prompt = chat_format().tokenizer.decode(request.prompt_token_ids).rpartition("user")[2]
    if "tool_output" in prompt:
        return wire(answer("The tool says 3.", "so"))
    if "use a tool" in prompt:
        return wire(TOOL_TURN)
    if "forever" in prompt:
        return wire(answer("on and " * 400, "x"))
    return wire(answer(EVIL, CAREFUL))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER or ""
    profile = tmp_path_factory.mktemp("profile")
    for flag in (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        f"--user-data-dir={profile}",
        "--window-size=1100,800",
    ):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


def find(browser: webdriver.Chrome, selector: str) -> WebElement:
    """The last such element, as soon as there is one."""
    found: list[WebElement] = WebDriverWait(browser, PATIENCE).until(
        lambda driver: driver.find_elements(By.CSS_SELECTOR, selector)
    )
    return found[-1]


def wait(browser: webdriver.Chrome, holds: Callable[[], Any]) -> None:
    WebDriverWait(browser, PATIENCE).until(lambda _driver: holds())


def ask(browser: webdriver.Chrome, text: str) -> None:
    find(browser, "#input").send_keys(text, Keys.ENTER)


def is_idle(browser: webdriver.Chrome) -> bool:
    return "generating" not in (find(browser, "body").get_attribute("class") or "")


def keep(browser: webdriver.Chrome, name: str) -> None:
    if SCREENSHOTS:
        browser.save_screenshot(str(Path(SCREENSHOTS) / f"{name}.png"))


def shape(browser: webdriver.Chrome, width: int, height: int, *, is_dark: bool = False) -> None:
    metrics = {"width": width, "height": height, "deviceScaleFactor": 2, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


@needs_browser
def test_a_conversation(browser: webdriver.Chrome) -> None:
    with live(script, engine={"delay": 0.002}) as (server, _client):
        shape(browser, 1100, 800)
        browser.get(server.url)
        assert find(browser, "#model").text in ("", "spark-mini")
        wait(browser, lambda: find(browser, "#model").text == "spark-mini")
        assert len(browser.find_elements(By.CSS_SELECTOR, "#examples button")) == 3
        keep(browser, "welcome")

        ask(browser, "hello")
        assert find(browser, ".reasoning").get_attribute("open") == "true"
        wait(browser, lambda: is_idle(browser))
        # The reasoning is folded once the answer has begun, and opens on a click.
        assert find(browser, ".reasoning").get_attribute("open") is None
        find(browser, ".reasoning summary").click()
        assert find(browser, ".reasoning > div").text == CAREFUL.strip()
        # What the model writes is text, whatever it spells.
        assert "<img src=x onerror=" in find(browser, ".answer").text
        assert find(browser, ".answer strong").text == "bold"
        assert find(browser, ".answer code").text == "<script>document.title=2</script>"
        assert not browser.find_elements(By.CSS_SELECTOR, ".answer img, .answer script")
        stats = find(browser, ".stats").text
        assert "tokens/s" in stats
        assert "first token after" in stats
        keep(browser, "answer")

        find(browser, "#new").click()
        assert find(browser, "#welcome").is_displayed()
        assert not browser.find_elements(By.CSS_SELECTOR, ".assistant")
        check_nothing_from_outside(browser, server.url)


@needs_browser
def test_a_tool_call_and_its_result(browser: webdriver.Chrome) -> None:
    with live(script, engine={"delay": 0.002}) as (server, _client):
        shape(browser, 1100, 800)
        browser.get(server.url)
        ask(browser, "hello")
        wait(browser, lambda: browser.find_elements(By.CSS_SELECTOR, ".answer"))
        wait(browser, lambda: is_idle(browser))
        find(browser, "#settings-button").click()
        find(browser, "#tools-example").click()
        find(browser, "#settings-button").click()
        find(browser, "#input").clear()
        ask(browser, "use a tool")
        field = find(browser, ".call input")
        assert '"a": 1' in find(browser, ".call pre").text
        keep(browser, "tool-call")
        field.send_keys("3", Keys.ENTER)
        wait(browser, lambda: "The tool says 3." in find(browser, ".answer").text)
        wait(browser, lambda: is_idle(browser))
        # The tool's turn came back whole: reasoning, call, result.
        prompt = chat_format().tokenizer.decode(server.engine.requests[-1].prompt_token_ids)
        assert "a sum" in prompt
        assert '<tool_output name="add">\n3' in prompt
        # Past reasoning stays behind.
        assert "carefully now" not in prompt
        assert "weather.get" in prompt
        browser.execute_script("localStorage.clear()")


def check_nothing_from_outside(browser: webdriver.Chrome, url: str) -> None:
    names = browser.execute_script(
        "return performance.getEntriesByType('resource').map((entry) => entry.name)"
    )
    assert names
    assert all(name.startswith(f"{url}/") for name in names), names
    # A breach of the page's own policy would stand here.
    assert browser.get_log("browser") == []


@needs_browser
def test_stopping_ends_the_engines_work(browser: webdriver.Chrome) -> None:
    with live(script, engine={"delay": 0.002}) as (server, _client):
        browser.get(server.url)
        ask(browser, "forever")
        wait(browser, lambda: "on and on" in find(browser, ".answer").text)
        find(browser, "#send").click()
        wait(browser, lambda: is_idle(browser))
        wait(browser, lambda: server.engine.num_running == 0)
        assert server.engine.aborted
        assert "stopped" in find(browser, ".stats").text
        ask(browser, "hello")
        wait(browser, lambda: "bold" in find(browser, ".answer").text)


@needs_browser
@pytest.mark.parametrize("is_dark", [False, True])
def test_it_fits_a_phone(browser: webdriver.Chrome, is_dark: bool) -> None:
    with live(script, engine={"delay": 0.0005}) as (server, _client):
        shape(browser, 390, 780, is_dark=is_dark)
        browser.get(server.url)
        ask(browser, "use a tool, please, and mind thelongwordthatdoesnotfitthescreen" * 2)
        find(browser, ".call input")
        find(browser, "#settings-button").click()
        keep(browser, f"phone-{'dark' if is_dark else 'light'}")
        width = browser.execute_script("return document.documentElement.scrollWidth")
        assert width <= 390
        colour = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, colour[4:-1].split(","))) < 200) is is_dark
        find(browser, "#theme").click()
        switched = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert switched != colour
        browser.execute_script("localStorage.clear()")


@needs_browser
def test_errors_and_keys(browser: webdriver.Chrome) -> None:
    with live(script, api_keys=("sesame",)) as (server, _client):
        shape(browser, 1100, 800)
        browser.get(server.url)
        wait(browser, lambda: find(browser, "#settings").is_displayed())
        ask(browser, "hello")
        assert "API key" in find(browser, ".error").text
        find(browser, "#key").send_keys("sesame", Keys.TAB)
        wait(browser, lambda: find(browser, "#model").text == "spark-mini")
        ask(browser, "hello")
        wait(browser, lambda: browser.find_elements(By.CSS_SELECTOR, ".answer"))
        server.in_loop(server.engine.die)
        wait(browser, lambda: is_idle(browser))
        ask(browser, "and now?")
        wait(browser, lambda: "died" in find(browser, ".error").text)


def test_the_page_may_load_nothing_from_elsewhere() -> None:
    with live(script) as (_server, client):
        page = client.get("/")
        policy = page.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert page.headers["x-content-type-options"] == "nosniff"
        assert page.headers["content-type"].startswith("text/html")
        for name, kind in (("chat.js", "text/javascript"), ("chat.css", "text/css")):
            assert client.get(f"/page/{name}").headers["content-type"].startswith(kind)
            assert "//" not in client.get(f"/page/{name}").text.replace("// ", "")
        assert client.get("/page/../app.py").status_code == 404
        assert client.get("/page/%2e%2e/app.py").status_code == 404
    with live(script, api_only=True) as (_server, client):
        assert client.get("/").status_code == 404
