#!/usr/bin/env python
"""Takes pictures of the monitor's page of a living run, light and dark.

    scripts/demo --page                               # prints the address of the page
    python scripts/picture_page.py http://127.0.0.1:PORT/

The digest of the page's files is stored with the pictures, so that a test notices later changes of
the page. It needs playwright (the extra `dev`) and chromium.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WEB = ROOT / "swarm" / "monitor" / "web"
PICTURES = ROOT / "scripts" / "pictures"
SCHEMES = ("light", "dark")
WIDTH, HEIGHT = 1240, 1120
QUALITY = 0.86
MAX_BYTES = 150_000
WAIT_MS = 60_000
SETTLE_MS = 2_000


def web_digest(folder: Path = WEB) -> str:
    """Digest of names and contents of the page's files."""
    whole = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        whole.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode() + content)
    return whole.hexdigest()


def picture(url: str, scheme: str) -> bytes:
    """The upper part of the page as a WebP."""
    from playwright.sync_api import sync_playwright  # an extra, which the digest does not need

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        size = {"width": WIDTH, "height": HEIGHT}
        page = browser.new_page(viewport=size, color_scheme=scheme)  # type: ignore[arg-type]
        page.goto(url, wait_until="commit")
        page.wait_for_selector("#peers tbody tr", timeout=WAIT_MS)
        page.wait_for_timeout(SETTLE_MS)
        shot = base64.b64encode(page.screenshot()).decode()
        blank = browser.new_page()  # a blank page, since the page's policy forbids foreign scripts
        encoded = blank.evaluate(
            """async ([shot, quality]) => {
              const image = new Image();
              image.src = `data:image/png;base64,${shot}`;
              await image.decode();
              const canvas = document.createElement("canvas");
              canvas.width = image.width;
              canvas.height = image.height;
              canvas.getContext("2d").drawImage(image, 0, 0);
              return canvas.toDataURL("image/webp", quality);
            }""",
            [shot, QUALITY],
        )
        browser.close()
    return base64.b64decode(encoded.partition(",")[2])


def main() -> int:
    """Writes page-light.webp, page-dark.webp and page.digest."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", help="address of a run's page, while the run trains")
    parser.add_argument("--out", type=Path, default=PICTURES, help="default: scripts/pictures")
    arguments = parser.parse_args()
    for scheme in SCHEMES:
        content = picture(arguments.url, scheme)
        if len(content) > MAX_BYTES:
            sys.stderr.write(f"{scheme}: {len(content)} bytes, more than {MAX_BYTES}\n")
            return 1
        (arguments.out / f"page-{scheme}.webp").write_bytes(content)
    (arguments.out / "page.digest").write_text(f"{web_digest()}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
