"""Training of drafts and heads."""
