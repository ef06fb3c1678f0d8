"""A Gemma 3 GGUF file as a Hugging Face folder with float32 weights, for engines that read no GGUF.

python benchmarks/make_hf_folder.py --gguf gemma-3-270m-q4_k_m.gguf --out gemma-3-270m
"""

from __future__ import annotations

from pathlib import Path

import click

from compare_engines.hf_folder import write_hf_folder
from lamella.errors import LamellaError


@click.command(help=__doc__.splitlines()[0])
@click.option("--gguf", type=click.Path(path_type=Path), required=True, help="the file to read")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="the folder to write")
def main(gguf: Path, out: Path) -> None:
    try:
        write_hf_folder(gguf, out)
    except LamellaError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"{out} written")


if __name__ == "__main__":
    main()
