"""Draw the example images of docs/howto/images.md, and the figure of that page.

python docs/shapes.py docs/figures
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

SIZE = (20, 24)  # height and width
COLOURS = ((205, 40, 50), (30, 130, 60), (40, 70, 190), (240, 170, 30))


def write(folder: Path, n: int = 600) -> None:
    """Write coloured circles, squares and triangles as PNG files, one subfolder per kind."""
    random = np.random.default_rng(0)
    height, width = SIZE
    for i in range(n):
        kind = ("circle", "square", "triangle")[i % 3]
        picture = Image.new("RGB", (8 * width, 8 * height), (245, 242, 235))
        pen, r = ImageDraw.Draw(picture), random.uniform(44, 56)
        x, y = random.uniform(r, 8 * width - r), random.uniform(r, 8 * height - r)
        colour = COLOURS[random.integers(len(COLOURS))]
        if kind == "circle":
            pen.ellipse((x - r, y - r, x + r, y + r), fill=colour)
        elif kind == "square":
            pen.rectangle((x - r, y - r, x + r, y + r), fill=colour)
        else:
            pen.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill=colour)
        file = folder / kind / f"{i:03}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        picture.resize((width, height), Image.Resampling.LANCZOS).save(file)


def draw(target: Path) -> None:
    """Train the model of the page, and draw its samples, reconstructions and latent map."""
    import torch
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    import aevb
    from aevb import Model, Normal, conv, deconv, fit
    from aevb.pictures import grid

    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "photos")
        photos = aevb.data.images(Path(folder) / "photos")
        torch.manual_seed(0)
        model = Model(
            p={"z": Normal(6), "x | z": Normal(photos.shape, net=deconv(32, 16), scale="learned")},
            q={"z | x": Normal(net=conv(16, 32))},
        )
        fit(model, {"x": photos.pixels}, epochs=200, batch=50, lr=3e-3, seed=0)
        some = photos.pixels[::40]
        rows = {
            "data": some,
            "reconstructed": model.reconstruct(x=some, seed=0)["x"],
            "samples": model.sample(len(some), mean=True, seed=0)["x"],
        }
        grid(rows, len(some), Path(folder) / "rows.png")
        codes = model.posterior(x=photos.pixels)["z"].mean.numpy()
        centred = codes - codes.mean(0)
        axes_of = np.linalg.svd(centred, full_matrices=False)[2][:2]
        figure = Figure(figsize=(9, 4.6), layout="constrained")
        FigureCanvasAgg(figure)
        above, below = figure.subplots(2, 1, height_ratios=(1.1, 1.6))
        with Image.open(Path(folder) / "rows.png") as picture:
            above.imshow(np.asarray(picture))
        above.axis("off")
        points = centred @ axes_of.T
        middle = photos.pixels.reshape(len(photos), -1, 3) / 255
        far = np.abs(middle - middle[:, :1]).sum(-1).argmax(1)
        colours = middle[np.arange(len(photos)), far]
        for number, (name, marker) in enumerate(zip(photos.names, "os^", strict=True)):
            mine = photos.labels == number
            below.scatter(*points[mine].T, c=colours[mine], marker=marker, s=22, label=name)
        below.set(xlabel="first principal component of z", ylabel="second")
        legend = below.legend(frameon=False, ncols=3, loc="upper right")
        for handle in legend.legend_handles:
            handle.set_facecolor("0.4")
        below.spines[["top", "right"]].set_visible(False)
        figure.savefig(target / "photos.png", dpi=110)


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
