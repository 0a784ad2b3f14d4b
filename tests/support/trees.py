"""Trees that tests of rules and of drafters share."""

from spec_jax.config import SamplerConfig
from spec_jax.tree import Tree

PLAIN = SamplerConfig(temperature=1.0)
BUSH = Tree((0, 0, 1, 1, 2, 3))  # 1, 2 | 3, 4 after 1, 5 after 2 | 6 after 3
