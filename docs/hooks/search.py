"""What the site's search finds, and what it finds first."""

from __future__ import annotations

from typing import Any

# By page: the package's own names come before those of rooms and examples; history is not searched.
PAGES: dict[str, dict[str, Any]] = {
    "reference/spec_jax.md": {"boost": 4.0},
    "reference/reference.md": {"boost": 0.5},  # the same names again, in NumPy
    "changelog.md": {"exclude": True},
    "decisions.md": {"exclude": True},
    **dict.fromkeys(
        (
            f"decisions/{room}.md"
            for room in "core engine models devices training evaluation project".split()
        ),
        {"exclude": True},
    ),
}
