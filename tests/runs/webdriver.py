"""A small client of chromedriver, by the WebDriver protocol of the W3C."""

import contextlib
import json
import re
import shutil
import subprocess
import tempfile
import time
from urllib.request import Request, urlopen

# Chromium and its driver, as Debian and others name them; None where they are missing.
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
CHROMEDRIVER = shutil.which("chromedriver")
ARGUMENTS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
             "--disable-background-networking", "--disable-component-update", "--disable-sync",
             "--disable-dev-shm-usage", "--js-flags=--expose-gc")  # fmt: skip


class Browser:
    """A headless Chromium with one window; a context manager."""

    def __init__(self):
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._driver = subprocess.Popen(
            [CHROMEDRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        port = next(found[1] for found in map(_PORT.search, self._driver.stdout) if found)
        self._url = f"http://127.0.0.1:{port}/session"
        options = {"binary": CHROMIUM, "args": [*ARGUMENTS, f"--user-data-dir={self._folder.name}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        answer = self._send("POST", "", {"capabilities": {"alwaysMatch": wanted}})
        self._url += f"/{answer['sessionId']}"

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        with contextlib.suppress(OSError):
            self._send("DELETE", "")
        self._driver.terminate()
        self._driver.wait(10)
        self._driver.stdout.close()
        self._folder.cleanup()

    def _send(self, method, path, body=None):
        data = None if method in ("GET", "DELETE") else json.dumps(body or {}).encode()
        request = Request(
            self._url + path, data, {"Content-Type": "application/json"}, method=method
        )
        with urlopen(request, timeout=120) as answer:
            return json.load(answer)["value"]

    def open(self, url):
        """Load a page, and forget what earlier ones logged."""
        self._send("POST", "/url", {"url": "about:blank"})
        self.log()
        self._send("POST", "/url", {"url": url})

    def run(self, script, *arguments):
        """Return what JavaScript returns."""
        return self._send("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def text(self, selector):
        """Return the text of the elements that a selector finds, a line each."""
        script = (
            "return [...document.querySelectorAll(arguments[0])].map(e => e.innerText).join('\\n')"
        )
        return self.run(script, selector)

    def wait(self, script, seconds=60.0):
        """Return what JavaScript returns, as soon as that is true."""
        end = time.monotonic() + seconds
        while not (found := self.run(script)):
            assert time.monotonic() < end, f"still false: {script}"
            time.sleep(0.02)
        return found

    def log(self):
        """Return what the console has shown since the last call."""
        return [entry["message"] for entry in self._send("POST", "/se/log", {"type": "browser"})]

    def devtools(self, command, **parameters):
        """Send a command of the DevTools protocol."""
        body = {"cmd": command, "params": parameters}
        return self._send("POST", "/goog/cdp/execute", body)

    def show(self, width, height=900, dark=False):
        """Give the window a size and a colour scheme."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.devtools("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.devtools("Emulation.setEmulatedMedia", features=[scheme])

    def mouse(self, kind, x, y, **more):
        """Move the mouse, or press or release its button."""
        self.devtools("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, **more)

    def picture(self):
        """Return the whole page as a PNG in base64."""
        return self.devtools("Page.captureScreenshot", captureBeyondViewport=True)["data"]

    def heap(self):
        """Return the bytes that JavaScript uses, without garbage."""
        self.devtools("HeapProfiler.collectGarbage")
        return self.devtools("Runtime.getHeapUsage")["usedSize"]


# The contrast of every visible text with what is behind it; the smallest one, and whose it is.
CONTRAST = """
const channel = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
const parse = text => text.match(/[\\d.]+/g).map(Number);
const luminance = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
const behind = e => {
  const colour = e ? parse(getComputedStyle(e).backgroundColor) : [255, 255, 255];
  return colour.length === 4 && colour[3] === 0 ? behind(e.parentElement) : colour;
};
const found = [...document.querySelectorAll("body *")].filter(e => e.checkVisibility() &&
  [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim())).map(e => {
    const pair = [getComputedStyle(e).color, 0].map((c, i) => luminance(i ? behind(e) : parse(c)));
    return [(Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05), e.outerHTML.slice(0, 100)];
  });
return found.sort((a, b) => a[0] - b[0])[0];
"""
_PORT = re.compile(r"started successfully on port (\d+)")
