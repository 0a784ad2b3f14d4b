"""torch and transformers; a module of tests that imports them is skipped where they are not."""

import pytest

torch = pytest.importorskip("torch", reason="parity needs torch (extra 'parity')")
transformers = pytest.importorskip(
    "transformers", reason="parity needs transformers (extra 'parity')"
)
transformers.utils.logging.disable_progress_bar()
