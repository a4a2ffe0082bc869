"""A process that runs a tokenizer, perhaps a stranger's: text in, token ids out.

This script imports nothing of the project. A bad tokenizer (recursion, a panic of its parser, an
endless regular expression, unbounded memory) stops only this process. The peer waits for it with a
deadline, and reports the failure. Usage: `swarm.data.encoders`.

Numbers are little-endian. The input begins with a header: bytes of the tokenizer.json (4), id of
the token that closes a document (4), memory limit (8). The file follows, and the answer is one
byte. Then batches come: number of documents (4), bytes of each (4), the documents. The answer is
the number of ids of each (4), then all ids (4). With `DECODE` added to the number of documents, the
directions are reversed: the input is numbers of ids and ids, and the answer is bytes of each
document and the documents.
"""

import array
import resource
import signal
import struct
import sys
from typing import BinaryIO

HEADER = struct.Struct("<IIQ")
NO_PACKAGE = 3
"""Exit code if the package tokenizers is missing."""
DECODE = 1 << 31
"""Added to the number of documents of a batch of ids."""


def main() -> int:
    """Answers until its input ends."""
    source, out = sys.stdin.buffer, sys.stdout.buffer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process ends this process
    size, end_of_text, memory_bytes = HEADER.unpack(_exactly(source, HEADER.size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    content = _exactly(source, size).decode()
    try:
        from tokenizers import Tokenizer  # optional: only runs with a tokenizer's file need it
    except ImportError:
        return NO_PACKAGE
    tokenizer = Tokenizer.from_str(content)
    del content
    # Overrides the file's settings: text that spells a special token is plain text, and nothing is
    # truncated.
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    out.write(b"!")
    out.flush()
    while head := source.read(4):
        (count,) = struct.unpack("<I", head)
        is_ids = count >= DECODE
        count %= DECODE
        sizes = struct.unpack(f"<{count}I", _exactly(source, 4 * count))
        counts = array.array("I")
        if is_ids:
            rows = [struct.unpack(f"<{size}I", _exactly(source, 4 * size)) for size in sizes]
            decoded = [tokenizer.decode(row, skip_special_tokens=False).encode() for row in rows]
            counts.extend(map(len, decoded))
            answer = b"".join(decoded)
        else:
            texts = [_exactly(source, size).decode() for size in sizes]
            ids = array.array("I")
            for found in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
                ids.extend(found.ids)
                ids.append(end_of_text)
                counts.append(len(found.ids) + 1)
            answer = ids.tobytes()
        out.write(counts.tobytes())
        out.write(answer)
        out.flush()
    return 0


def _exactly(source: BinaryIO, size: int) -> bytes:
    found = source.read(size)
    if len(found) < size:
        sys.exit(0)  # the parent process has ended
    return found


if __name__ == "__main__":
    sys.exit(main())
