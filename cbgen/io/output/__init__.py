"""Where the rows of a run go: the output, its journal, and what is noted beside them."""
