"""Training: objectives, the optimizer, one step, the loop around it, and what a run keeps."""
