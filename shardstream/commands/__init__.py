"""The commands of ``shardstream``, one file each; see ``cli.COMMANDS``."""
