"""Caches: keys and values, states, snapshots, replay."""
