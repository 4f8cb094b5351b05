"""``python -m shardstream``: the same as the command ``shardstream``."""

from __future__ import annotations

from shardstream.cli import main

if __name__ == "__main__":
    main(prog_name="shardstream")
