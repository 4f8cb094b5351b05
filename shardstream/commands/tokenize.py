"""``shardstream tokenize``: from text to Parquet shards of token lists."""

from __future__ import annotations

from typing import Any

import click

from shardstream.commands._prepare import prepare_options, run_prepare


@click.command()
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.argument("output")
@click.option(
    "--tokenizer",
    required=True,
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE",
    help="A tokenizer.json of Hugging Face's tokenizers.",
)
@click.option(
    "--text-column", default="text", show_default=True, metavar="COLUMN", help="Text, or bytes of UTF-8 (tars: txt)."
)
@click.option("--keep", multiple=True, metavar="COLUMN", help="Keep this column as well. Repeatable.")
@click.option("--eos", metavar="TOKEN", help="Put this token after every document, e.g. '<|endoftext|>'.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "uint16", "int32"]),
    default="auto",
    show_default=True,
    help="Of the tokens; auto takes uint16 where every id fits.",
)
@click.option("--special-tokens", "with_special", is_flag=True, help="Let the tokenizer add its special tokens.")
@click.option(
    "--pack",
    type=click.IntRange(1),
    multiple=True,
    metavar="T",
    help='Count the sequences of T tokens that whole documents make, for packing="whole". Repeatable.',
)
@prepare_options
def tokenize(
    inputs: tuple[str, ...],
    output: str,
    tokenizer: str,
    text_column: str,
    pack: tuple[int, ...],
    **options: Any,
) -> None:
    """Write the tokens of INPUT's texts as Parquet shards in the folder OUTPUT.

    A row in is a row out: `tokens`, `num_tokens`, and what is kept. INPUT, shards, going on after a kill and the
    record of where samples came from are as for `shardstream reshard`. Texts are never cut, whatever the tokenizer's
    file says of truncation. Packing with eos_id= puts an end after every document itself: then leave --eos out.
    """
    from shardstream.prepare import Tokenize

    of_step = {name: options.pop(name) for name in ("keep", "eos", "dtype", "with_special")}
    run_prepare(inputs, output, lambda: Tokenize.make(tokenizer, text_column, **of_step), options, pack=pack)
