"""report.html of a run: one page without a network, with tables, plots and coloured tokens."""
