"""`python -m cbgen`: the same as the `cbgen` command."""

from __future__ import annotations

from cbgen.cli.app import main

main()
