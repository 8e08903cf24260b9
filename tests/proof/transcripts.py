"""Records what owners and apps see, and lists what differs between two records that one machine made.

    python tests/proof/transcripts.py run CHECKOUT RECORD.json [--python PYTHON] [--only CHAPTER...] [--keep FOLDER]
    python tests/proof/transcripts.py compare BEFORE.json AFTER.json

The chapters: what commands print, their help, stores of earlier versions, conversations with `serve`, public names,
and the schema of messages. `placeholders.py` says what is left out. `same_bits.py` has the bits.
"""

import sys
from pathlib import Path

import checkout


def make_parts(work: Path, of: Path) -> checkout.Parts:
    """Returns the chapters."""
    from commands import EARLIER, commands_without_transcript, record_help, record_story
    from conversations import record_conversations
    from placeholders import Placeholders
    from public_names import record_names, record_schema

    import sebp_edge.cli.commands
    import sebp_edge.personalizer  # noqa: F401

    def placeholders(folder: Path) -> Placeholders:
        return Placeholders({folder: "<folder>", work: "<work>", EARLIER: "<earlier stores>"})

    def record_commands(folder: Path, work: Path) -> dict:
        found = record_story("commands", folder, work, placeholders(folder))
        return found | {"commands without a transcript": commands_without_transcript(found)}

    return {
        "commands": record_commands,
        "earlier stores": lambda folder, work: record_story("earlier_stores", folder, work, placeholders(folder)),
        "help": lambda *_: record_help(),
        "serve": lambda folder, work: record_conversations(folder, work, placeholders(folder)),
        "public names": lambda *_: record_names(of),
        "schema": lambda *_: record_schema(work / "site"),
    }


if __name__ == "__main__":
    sys.exit(checkout.main(__file__, __doc__, make_parts))
