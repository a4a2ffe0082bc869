"""swarm-peer in a drill that offers values but serves them to nobody, once a file exists."""

import asyncio
import os
from pathlib import Path
from typing import Any

from peers.emulated import emulate
from peers.peer import main
from swarm.emulation.controls import FOLDER_VARIABLE, INDEX_VARIABLE
from swarm.network.fetch.blob_server import ANSWER_S, BlobServer
from swarm.network.fetch.bulk import Ask

WITHHOLD = "withhold"
"""File in the folder of controls."""

honest_answer = BlobServer._answer


async def answer(self: BlobServer, ask: Ask, *given: Any) -> bool:
    """Serves the offers themselves, so that others then want their values."""
    if not self._is_control(ask.digest) and (folder / WITHHOLD).exists():
        await asyncio.sleep(ANSWER_S)
    return await honest_answer(self, ask, *given)


if __name__ == "__main__":
    folder = Path(os.environ[FOLDER_VARIABLE])
    BlobServer._answer = answer  # type: ignore[assignment]
    main(obj=emulate(folder, int(os.environ[INDEX_VARIABLE])))
