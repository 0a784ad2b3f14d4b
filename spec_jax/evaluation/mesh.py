"""The devices of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.sharding import Mesh

from spec_jax import meshes, sharding
from spec_jax.errors import ConfigError
from spec_jax.loading import LoadedHead, LoadedModel


class MeshOptions(NamedTuple):
    """The devices that an experiment runs on: ``config.mesh`` and ``config.is_draft_replicated``.

    Attributes:
      mesh: The devices; None: one.
      is_draft_replicated: Whether drafts are replicated on the mesh.
    """

    mesh: Mesh | None = None
    is_draft_replicated: bool = False

    @classmethod
    def of(cls, config: Any) -> MeshOptions:
        """Reads ``mesh`` and ``is_draft_replicated`` of a config.

        Raises:
          ConfigError: There is no such mesh, or too few devices; or ``is_draft_replicated`` is set
            without a mesh.
        """
        mesh = meshes.make_mesh(config.mesh) if config.mesh else None
        if config.is_draft_replicated and mesh is None:
            raise ConfigError("is_draft_replicated is True; expected a mesh too: --config.mesh=...")
        return cls(mesh, config.is_draft_replicated)

    @property
    def draft_axis_rules(self) -> sharding.AxisRules:
        """Which dimensions of a draft are split over the mesh."""
        return sharding.REPLICATED if self.is_draft_replicated else sharding.SHARDED

    def check_drafts(self, drafts: Sequence[LoadedModel | LoadedHead]) -> None:
        """Raises ConfigError if drafts are to be replicated, and there are none."""
        if self.is_draft_replicated and not drafts:
            raise ConfigError("is_draft_replicated is True; expected a draft model or a head too")

    def options(self, draft: LoadedModel | LoadedHead | None) -> dict[str, Any]:
        """Returns the arguments of a ``SpeculativeDecoder`` with this draft."""
        is_whole = self.is_draft_replicated and draft is not None
        return {"mesh": self.mesh, "is_draft_replicated": is_whole}

    def facts(
        self,
        target: LoadedModel,
        drafts: Sequence[LoadedModel | LoadedHead] = (),
        batch: int | None = None,
    ) -> dict[str, Any] | None:
        """Returns the mesh for a report, and what it does not divide; None without a mesh.

        Args:
          target: The target.
          drafts: What drafts for it.
          batch: The rows that are decoded together.
        """
        if self.mesh is None:
            return None
        whole = target.unsplit_weights(self.mesh)
        for draft in drafts:
            whole += draft.unsplit_weights(self.mesh, self.draft_axis_rules)
        return {
            "axes": dict(self.mesh.shape),
            "devices": [str(device) for device in self.mesh.devices.flat],
            "is_draft_replicated": self.is_draft_replicated,
            "kept_whole": whole + (sharding.unsplit_batch(batch, self.mesh) if batch else []),
        }
