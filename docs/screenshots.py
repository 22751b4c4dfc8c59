"""Take the picture of a page that docs/howto/pages.md and the README show.

python docs/screenshots.py runs/gmvae     # the folder of a run; needs playwright and Chromium
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

OUT = Path(__file__).resolve().parent / "figures" / "page.png"
LASSO = [(-90, 0), (-45, -75), (45, -75), (90, 0), (45, 75), (-45, 75), (-90, 0)]


def main(run: str) -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page_file = Path(folder) / "page.html"
        subprocess.run([sys.executable, "-m", "aevb", "page", run, "--out", page_file], check=True)
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": 1240, "height": 1130}, device_scale_factor=1.5)
        page.goto(page_file.as_uri())
        page.wait_for_function("window.aevb?.mapPart?.draws > 0")
        page.evaluate("document.getElementById('map').scrollIntoView()")
        box = page.locator("canvas.map").bounding_box()
        assert box is not None
        middle = box["x"] + box["width"] * 0.42, box["y"] + box["height"] * 0.42
        page.click("[data-tool=lasso]")
        page.mouse.move(middle[0] + LASSO[0][0], middle[1] + LASSO[0][1])
        page.mouse.down()
        for x, y in LASSO[1:]:
            page.mouse.move(middle[0] + x, middle[1] + y)
        page.mouse.up()
        page.click("[data-tool=decode]")
        page.mouse.move(*middle)
        page.mouse.down()
        page.mouse.move(middle[0] + 40, middle[1] + 30)
        page.mouse.up()
        page.wait_for_function("window.aevb.mapPart.explorer.found")
        page.screenshot(path=OUT)
        browser.close()
    print(OUT)


if __name__ == "__main__":
    main(sys.argv[1])
