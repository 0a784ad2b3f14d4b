"""Training: losses, and the state and step of a language model."""
