"""Draft and target on devices of their own."""
