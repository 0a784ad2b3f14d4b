"""What drafters share: chains, trees, heads."""
