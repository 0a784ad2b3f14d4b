"""How objects look: short texts, HTML for notebooks, and plots, all drawn from plain values."""
