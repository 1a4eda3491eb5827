# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium, driven over its DevTools protocol, and a server for a built site.

Only what the tests of the site need: visit a page, collect what it complains about and loads, run
JavaScript in it, press keys, take a picture. Needs websocket-client and a Chromium of the system.
Runs: host.
"""

import base64
import contextlib
import functools
import http.server
import importlib.util
import json
import shutil
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # Chromium refuses to run as root with it; only pages of our own are opened
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)
TIMEOUT = 20.0  # seconds for the browser to start, to answer, or to load a page
QUIET = 0.25  # seconds without a request after which a page counts as loaded
MAX_HEIGHT = 5000  # pixels of a picture
DESKTOP, PHONE = (1440, 900), (390, 844)  # sizes of a window, in pixels
KEYS = {  # name: (number of the key, what it types)
    "Tab": (9, ""),
    "Enter": (13, "\r"),
    " ": (32, " "),
    "End": (35, ""),
    "Home": (36, ""),
    "ArrowLeft": (37, ""),
    "ArrowUp": (38, ""),
    "ArrowRight": (39, ""),
    "ArrowDown": (40, ""),
}


def executable() -> str | None:
    """Path of a Chromium of this system; None where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def lacking() -> str:
    """What this machine needs for a browser and does not have, in words; empty if nothing."""
    there = {
        "a Chromium": executable(),
        "the package websocket-client": importlib.util.find_spec("websocket"),
    }
    return ", ".join(what for what, found in there.items() if not found)


class Browser:
    """One tab. Its `problems` since the last visit: errors on the console, requests that failed,
    requests to anywhere but `origin`."""

    def __init__(self, socket, origin: str):
        self.origin, self.problems, self.loaded = origin, [], False
        self._socket, self._next, self._last_request = socket, 0, 0.0
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params) -> dict:
        """Call a method of the protocol; its result. RuntimeError when the browser refuses."""
        self._next += 1
        number = self._next
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = self._receive()
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]

    def _receive(self) -> dict:
        message = json.loads(self._socket.recv())
        if "method" in message:
            self._note(message["method"], message["params"])
        return message

    def _note(self, method: str, params: dict) -> None:
        if method == "Page.loadEventFired":
            self.loaded = True
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            text = details.get("exception", {}).get("description", details["text"])
            self.problems.append(f"exception: {text}")
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            said = [str(item.get("value", item.get("description"))) for item in params["args"]]
            self.problems.append(f"console: {' '.join(said)}")
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(f"log: {params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self._last_request, url = time.monotonic(), params["request"]["url"]
            if not url.startswith((self.origin, "data:", "blob:")):
                self.problems.append(f"request to elsewhere: {url}")
        elif method == "Network.loadingFailed" and not params.get("canceled"):
            self.problems.append(f"request failed: {params['errorText']}")

    def view(self, width: int, height: int, scheme: str = "light", *, phone: bool = False) -> None:
        """Size of the window in pixels, and the colours that the system prefers."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.send("Emulation.setEmulatedMedia", features=[feature])

    def visit(self, path: str) -> None:
        """Open a page of the site, given from its root, and wait until it has loaded all."""
        self.problems, self.loaded = [], False
        self.send("Page.navigate", url=f"{self.origin}/{path}")
        self.wait(lambda: self.loaded, f"{path} to load")
        self.wait(lambda: time.monotonic() - self._last_request > QUIET, f"{path} to be quiet")

    def wait(self, holds, what: str) -> None:
        """Handle events until `holds()`; TimeoutError after TIMEOUT seconds."""
        end = time.monotonic() + TIMEOUT
        while not holds():
            if time.monotonic() > end:
                raise TimeoutError(f"waited {TIMEOUT:g} s for {what}")
            self.run("0")  # its answer comes behind the events so far
            time.sleep(0.02)

    def run(self, expression: str):
        """The value of a JavaScript expression in the page; RuntimeError when it throws."""
        done = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in done:
            raise RuntimeError(f"{expression}: {done['exceptionDetails']}")
        return done["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until a JavaScript expression is true."""
        self.wait(lambda: self.run(expression), expression)

    def press(self, *keys: str, control: bool = False) -> None:
        """Press and release keys of KEYS one after the other, as a keyboard does."""
        for key in keys:
            number, text = KEYS[key]
            event = {"key": key, "code": key.strip() or "Space", "windowsVirtualKeyCode": number}
            event["modifiers"] = 2 * control
            down = {"type": "keyDown", "text": text} if text else {"type": "rawKeyDown"}
            self.send("Input.dispatchKeyEvent", **event, **down)
            self.send("Input.dispatchKeyEvent", **event, type="keyUp")

    def focused(self) -> tuple[str, str]:
        """(role, name) of the element that has the focus, as assistive means are told them."""
        node = self.send("Runtime.evaluate", expression="document.activeElement")["result"]
        chosen = {"objectId": node["objectId"], "fetchRelatives": False}
        told = self.send("Accessibility.getPartialAXTree", **chosen)["nodes"][0]
        return tuple(told.get(key, {}).get("value", "") for key in ("role", "name"))

    def scripts(self, on: bool) -> None:
        """Whether pages that are visited from now on may run their scripts; `run` always may."""
        self.send("Emulation.setScriptExecutionDisabled", value=not on)

    def picture(self, path: Path) -> None:
        """Write the page as PNG, from its top down to MAX_HEIGHT."""
        time.sleep(QUIET)  # colours that change take an eighth of a second
        width = self.run("innerWidth")
        height = min(MAX_HEIGHT, self.run("document.documentElement.scrollHeight"))
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = self.send("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(shot["data"]))


class _Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments) -> None:
        """Say nothing."""


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serves a folder on this machine alone; gives its address."""
    handler = functools.partial(_Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def _tab(profile: Path, process: subprocess.Popen) -> str:
    """Address of the socket of the first tab, once the browser has written its port."""
    written, end = profile / "DevToolsActivePort", time.monotonic() + TIMEOUT
    while not (written.is_file() and written.read_text().count("\n")):
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"Chromium did not start: {(profile / 'log').read_text()[-2000:]}")
        time.sleep(0.05)
    port = written.read_text().split()[0]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=TIMEOUT) as answer:
        tabs = json.load(answer)
    return next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[Browser]:
    """A browser on the site in `folder`; ended with its profile and the server afterwards."""
    import websocket

    with served(folder) as origin, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        profile = Path(name)
        command = [executable(), *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        with (profile / "log").open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            address = _tab(profile, process)
            with contextlib.closing(
                websocket.create_connection(address, timeout=TIMEOUT, suppress_origin=True)
            ) as socket:
                yield Browser(socket, origin)
        finally:
            process.terminate()
            process.wait(TIMEOUT)
