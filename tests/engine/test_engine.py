"""The way of a prompt from the public call to the round."""

import inspect
import pathlib

import spec_jax
from spec_jax import SpeculativeConfig, SpeculativeDecoder, decoding
from spec_jax.decoding import loop
from spec_jax.testing import mock_model

PACKAGE = str(pathlib.Path(spec_jax.__file__).parent)


def test_a_prompt_reaches_the_round_in_seven_frames(monkeypatch):
    """Frames of this package, from ``SpeculativeDecoder.generate`` to ``decode_round``."""
    found, real = [], decoding.decode_round

    def counting(params, state, system):
        files = [frame.filename for frame in inspect.stack()[1:]]
        found.append(1 + sum(file.startswith(PACKAGE) for file in files))
        return real(params, state, system)

    monkeypatch.setattr(loop, "decode_round", counting)
    config = SpeculativeConfig(num_speculative_tokens=5)  # compiled here and nowhere else
    decoder = SpeculativeDecoder(mock_model(7), mock_model(7, 1), config)
    decoder.generate([1, 2], 5)
    assert found and max(found) <= 7
