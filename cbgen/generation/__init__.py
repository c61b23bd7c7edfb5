"""What one request may say: the fields of a generation config, their checks and their effect."""
