"""Makes the tables and the picture of the page of records again: this project's plans next to other systems' results.

    python -m studies.records                 print the blocks of bench/results/records.md
    python -m studies.records --write         print, and write the blocks of records.md, and records.svg

The command takes up to half an hour, mostly for the longest sequences; nothing is compiled or run. The scripts of
single blocks (`records_compiled.py`, `records_people.py`, `records_planned.py`) take the same options.
"""

import argparse

from bench import figures
from bench.blocks import write_block
from studies import records_compiled, records_people, records_picture, records_planned

PAGE = records_planned.PAGE
BLOCKS = {
    "compiled": records_compiled.report,
    "people": records_people.report,
    "records": records_planned.report,
}


def main(arguments: list[str] | None = None) -> int:
    """Prints all blocks, and writes them and the picture if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the blocks of records.md, and records.svg")
    args = parser.parse_args(arguments)
    for name, make in BLOCKS.items():
        text = make()
        print(text, flush=True)
        if args.write:
            write_block(PAGE, name, text)
    if args.write:
        figures.write(PAGE.with_suffix(".svg"), records_picture.picture())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
