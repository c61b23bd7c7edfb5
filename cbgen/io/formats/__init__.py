"""The formats that rows are read from and written to."""
