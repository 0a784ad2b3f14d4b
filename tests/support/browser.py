"""A browser without a window, where one is installed."""

import json
import os
import pathlib
import select
import shutil
import subprocess
import sys

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason=f"no browser: none of {', '.join(NAMES)} is there"
)


def dump(url: str, home: pathlib.Path) -> str:
    """Returns the elements of a page, after its scripts, as HTML."""
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={home}"]
    options = dict(capture_output=True, text=True, timeout=120, check=True)
    return subprocess.run([*command, "--dump-dom", url], **options).stdout


_WITH_PIPES = """
import fcntl, os, sys
pipes = [fcntl.fcntl(int(text), fcntl.F_DUPFD, 10) for text in sys.argv[1:3]]
for number, pipe in enumerate(pipes, 3):
    os.dup2(pipe, number)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """A browser that does what its DevTools protocol says, over the pipes 3 and 4.

    Attributes:
      requests: the addresses that the page has asked for.
    """

    def __init__(self, home: pathlib.Path):
        theirs, self._write = os.pipe()
        self._read, their_write = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        command = [BROWSER, *flags, f"--user-data-dir={home}", "about:blank"]
        pipes = (theirs, their_write)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WITH_PIPES, *map(str, pipes), *command],
            pass_fds=pipes,
            stderr=subprocess.DEVNULL,
        )
        for pipe in pipes:
            os.close(pipe)
        self._rest = b""
        self._count = 0
        self._session = {}
        self._events = []
        targets = self.do("Target.getTargets")["targetInfos"]
        (page,) = (target["targetId"] for target in targets if target["type"] == "page")
        found = self.do("Target.attachToTarget", targetId=page, flatten=True)
        self._session = {"sessionId": found["sessionId"]}
        for domain in ("Page", "Network", "Runtime"):
            self.do(f"{domain}.enable")

    def _message(self):
        while b"\0" not in self._rest:
            assert select.select([self._read], [], [], 60)[0], "the browser does not answer"
            part = os.read(self._read, 2**20)
            assert part, "the browser has ended"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def do(self, method, **params):
        """Calls a method of the protocol, and returns its result."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params, **self._session}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._count:
                return answer["result"]
            self._events.append(answer)

    def open(self, url, width, scheme):
        """Opens a page in a window of a width, on a system with a colour scheme."""
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        self.do("Emulation.setEmulatedMedia", features=media)
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.do("Emulation.setDeviceMetricsOverride", **size)
        self._events = []
        self.do("Page.navigate", url=url)
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._events.append(self._message())

    @property
    def requests(self):
        sent = (e["params"] for e in self._events if e["method"] == "Network.requestWillBeSent")
        return [params["request"]["url"] for params in sent]

    def ask(self, script):
        """Runs a script, and returns its value."""
        found = self.do("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, key):
        for kind in ("keyDown", "keyUp"):
            code = {"Tab": 9}[key]
            self.do(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code
            )

    def close(self):
        self._process.terminate()
        self._process.wait()
        for pipe in (self._read, self._write):
            os.close(pipe)
