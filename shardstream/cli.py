"""The command line. Commands are files of ``shardstream.commands``, loaded when they are called or listed.

Exit codes: 0 good, 1 a fault in data, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

from importlib import import_module

import click

from shardstream._version import __version__
from shardstream.errors import ShardStreamError

# A command is one file here, ``commands/<name>.py``, with a click command of that name. It imports what is heavy
# inside its function, because `shardstream --help` imports every file.
COMMANDS = ("index", "merge", "inspect", "audit", "report", "plan", "bench", "reshard", "tokenize", "verify")

_INTERRUPTED = 130


class DataFault(click.ClickException):
    """A fault in data: shown as one message, without a traceback."""

    exit_code = 1


class CommandGroup(click.Group):
    """Finds commands by name among ``COMMANDS``, and turns errors into messages and exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns the names of all commands."""
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Returns a command, its file imported now; None if there is none of that name."""
        del ctx
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(import_module(f"shardstream.commands.{cmd_name}"), cmd_name)
        return command

    def invoke(self, ctx: click.Context) -> object:
        """Runs the command.

        Raises:
            DataFault: If it raises one of the package's errors.
            click.exceptions.Exit: If it is interrupted.
        """
        try:
            return super().invoke(ctx)
        except ShardStreamError as error:
            raise DataFault(str(error)) from error
        except KeyboardInterrupt:
            click.echo("\nInterrupted; nothing was written.", err=True)
            raise click.exceptions.Exit(_INTERRUPTED) from None


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="shardstream")
def main() -> None:
    """Feed data-parallel training from Parquet and tar shards in one provable order, resumable at any scale."""
