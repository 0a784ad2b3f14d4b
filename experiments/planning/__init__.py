"""Plans of a deployment, and published speed-ups."""
