"""Makes docs/records.md again, tables and picture: this project's plans beside what other systems reached.

    python -m studies.records                 print
    python -m studies.records --write         print, and write the blocks of docs/records.md and docs/records.svg

Takes half an hour, most of it for the longest sequences that plans hold; nothing is compiled or run. The scripts of
single blocks (`records_compiled.py`, `records_people.py`, `records_planned.py`) take the same words.
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
    parser.add_argument(
        "--write", action="store_true", help="write the blocks of docs/records.md, and docs/records.svg"
    )
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
