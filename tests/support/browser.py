"""A browser without a window, where one is installed."""

from __future__ import annotations

import pathlib
import shutil
import subprocess

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason=f"no browser: none of {', '.join(NAMES)} is there"
)


def browse(url: str, home: pathlib.Path, *flags: str) -> str:
    """Opens a page, runs its scripts, does what the flags say, and returns what it prints."""
    arguments = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={home}"]
    done = subprocess.run(
        [*arguments, *flags, url], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout


def dump(url: str, home: pathlib.Path, *flags: str) -> str:
    """Returns the elements of a page, after its scripts, as HTML."""
    return browse(url, home, "--dump-dom", *flags)
