"""Folders of image files and arrays of bytes, from the file to the model and to a picture."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import aevb
from aevb import Bernoulli, ContinuousBernoulli, Model, Normal, Poisson, conv, deconv, fit
from aevb.data import images
from aevb.data.builtin import Images
from aevb.data.datasets import load
from aevb.data.image_folders import shape_of
from aevb.data.sources import open_source
from aevb.estimate.batch import holds_pixels
from aevb.pictures import grid
from aevb.runtime.checked_files import DataWarning
from aevb.zoo import zoo

COLOURS = np.random.default_rng(0).integers(0, 256, (9, 5, 7, 3), dtype=np.uint8)
GREYS = COLOURS[..., 0]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two folders, of colours and of grey levels, with the classes cat and dog."""
    place = tmp_path_factory.mktemp("images")
    for name, pixels in (("colours", COLOURS), ("greys", GREYS)):
        for i, one in enumerate(pixels):
            file = place / name / ("cat" if i < 4 else "dog") / f"{i}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(one).save(file)
    return place


def small(shape: tuple[int, ...], family: Any = ContinuousBernoulli) -> Model:
    torch.manual_seed(0)
    return Model(
        p={"z": Normal(2), "x | z": family(shape, net=deconv(3, hidden=6))},
        q={"z | x": Normal(net=conv(3, hidden=6))},
    )


# Files --------------------------------------------------------------------------------------------


def test_a_folder_is_an_array_of_bytes_with_classes(folders: Path) -> None:
    found = images(folders / "colours")
    assert isinstance(found, Images)
    assert np.array_equal(found.pixels, COLOURS)
    assert found.labels.tolist() == [0] * 4 + [1] * 5
    assert (found.names, found.shape, len(found)) == (("cat", "dog"), (3, 5, 7), 9)
    assert found.files[0] == folders / "colours" / "cat" / "0.png"
    assert shape_of(folders / "colours") == (3, 5, 7)
    grey = images(folders / "greys", classes=["bird", "dog", "cat"])
    assert np.array_equal(grey.pixels, GREYS)
    assert (grey.shape, set(grey.labels.tolist())) == ((1, 5, 7), {1, 2})
    assert images(folders / "greys", colour=True).shape == (3, 5, 7)
    assert images(folders / "colours", colour=False).shape == (1, 5, 7)
    flat = images(folders / "greys" / "cat")
    assert (flat.names, flat.labels.tolist()) == ((), [-1] * 4)


def test_kinds_of_files_become_bytes(tmp_path: Path) -> None:
    """Transparent pixels are white, 16 bits are cut to 8, palettes and black and white are grey
    levels or colours, and a camera's rotation is applied.
    """
    clear = np.zeros((2, 2, 4), np.uint8)
    clear[0, 0] = [10, 20, 30, 255]
    Image.fromarray(clear).save(tmp_path / "a.png")
    Image.fromarray(np.full((2, 2), 0x1234, np.uint16)).save(tmp_path / "b.png")
    Image.fromarray(np.eye(2, dtype=bool)).save(tmp_path / "c.png")
    found = images(tmp_path).pixels
    assert found[0].tolist() == [[[10, 20, 30], [255] * 3], [[255] * 3, [255] * 3]]
    assert (found[1] == 0x12).all()
    assert np.array_equal(found[2, ..., 0], 255 * np.eye(2))
    turned = tmp_path / "turned"
    turned.mkdir()
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned by 90°
    Image.fromarray(GREYS[0]).save(turned / "a.jpg", exif=exif)
    assert images(turned).shape == (1, 7, 5) == shape_of(turned)


def test_files_are_cropped_and_resized_on_request(tmp_path: Path) -> None:
    wide = np.zeros((4, 12), np.uint8)
    wide[:, 4:8] = 200  # the centre
    Image.fromarray(wide).save(tmp_path / "wide.png")
    Image.fromarray(np.full((2, 2), 200, np.uint8)).save(tmp_path / "small.png")
    with pytest.raises(ValueError, match=r"differ in size.*4×12 \(1, such as wide.png\).*--size"):
        images(tmp_path)
    found = images(tmp_path, size=4)
    assert found.shape == (1, 4, 4)
    assert np.abs(found.pixels.astype(int) - 200).max() <= 1
    assert images(tmp_path, size=(2, 3)).shape == (1, 2, 3)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="There is no folder .*none"):
        images(tmp_path / "none")
    with pytest.raises(ValueError, match=r"holds no images. Images are files ending in .png"):
        images(tmp_path)
    Image.fromarray(GREYS[0]).save(tmp_path / "good.png")
    (tmp_path / "broken.jpg").write_bytes(b"no image")
    whole = (tmp_path / "good.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"2 of the 3 images in .* broken.jpg \(not an image, or"):
        images(tmp_path)
    for name in ("broken.jpg", "cut.png"):
        (tmp_path / name).unlink()
    (tmp_path / ".hidden.png").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.warns(DataWarning, match="1 images were read; notes.txt is no image"):
        assert len(images(tmp_path)) == 1
    (tmp_path / "notes.txt").unlink()
    with pytest.raises(ValueError, match=r"size is \(height, width\)"):
        images(tmp_path, size=0)
    os.renames(tmp_path / "good.png", tmp_path / "bird" / "good.png")
    with pytest.raises(ValueError, match="subfolder 'bird', which is no class of cat"):
        images(tmp_path, classes=["cat"])


# Bytes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pixels", "shape"),
    [(GREYS, (1, 5, 7)), (COLOURS, (3, 5, 7)), (np.moveaxis(COLOURS, -1, 1), (3, 5, 7))],
)
def test_bytes_are_pixels_in_every_order_of_axes(
    pixels: np.ndarray, shape: tuple[int, ...]
) -> None:
    """A model sees (x + ½)/256, and training (x + u)/256, channels first."""
    model = small(shape)
    first = pixels[:, None] if pixels.ndim == 3 else pixels
    first = first if first.shape[1:] == shape else np.moveaxis(first, -1, 1)
    seen = model.prepare(x=pixels)["x"][0].numpy().reshape(first.shape)
    np.testing.assert_allclose(seen, (first + 0.5) / 256, rtol=1e-6)
    source = open_source(model.graph, {"x": pixels}, model._parameter())
    trained = source.take(torch.arange(9))["x"][0].numpy().reshape(first.shape)
    assert source.pixels == {"x": "dequantise"}
    assert np.array_equal((trained * 256).astype(int), first)
    run = fit(model, {"x": torch.as_tensor(pixels)}, steps=2, batch=4, progress=False)
    note = next(row for row in run.rows if row.get("kind") == "pixels prepared")
    assert note["note"].startswith("x holds images of bytes, dequantised to (0, 1)")
    assert model.reconstruct(x=pixels)["x"].shape == (9, *shape)


def test_bytes_are_prepared_as_the_likelihood_requires() -> None:
    shape = (1, 5, 7)
    binary, counts = small(shape, Bernoulli), small(shape, Poisson)
    assert np.array_equal(binary.prepare(x=GREYS)["x"][0].reshape(9, 5, 7), GREYS >= 128)
    assert np.array_equal(counts.prepare(x=GREYS)["x"][0].reshape(9, 5, 7), GREYS)
    # Bytes of 0 and 1 are numbers, and so are columns of a table.
    ones = (GREYS > 128).astype(np.uint8)
    assert np.array_equal(binary.prepare(x=ones)["x"][0].reshape(9, 5, 7), ones)
    table = Model({"z": Normal(2), "x | z": Normal(7)}, {"z | x": Normal()})
    assert not holds_pixels(table.graph, "x", GREYS[:, 0])
    flat = Model({"z": Normal(2), "x | z": Normal(35)}, {"z | x": Normal()})
    np.testing.assert_allclose(
        flat.prepare(x=GREYS)["x"][0], (GREYS.reshape(9, 35) + 0.5) / 256, rtol=1e-6
    )
    with pytest.raises(ValueError, match=r"expected \[N, 1, 5, 7\].*of the data, \(1, 7, 5\), or"):
        small(shape).prepare(x=GREYS.transpose(0, 2, 1))


def videos(shape: tuple[int, ...], family: Any = ContinuousBernoulli) -> Model:
    torch.manual_seed(0)
    read = {"net": conv(3, hidden=6)} if len(shape) > 1 else {}
    drawn = {"net": deconv(3, hidden=6)} if len(shape) > 1 else {}
    return Model(
        p={"z[t] | z[t-1]": Normal(2), "x[t] | z[t]": family(shape, **drawn)},
        q={"z[t] | x[t]": Normal(**read)},
    )


@pytest.mark.parametrize("as_list", [False, True], ids=["array", "list"])
@pytest.mark.parametrize("shape", [(1, 5, 7), (3, 5, 7), (35,)], ids=str)
def test_bytes_of_videos_are_pixels(shape: tuple[int, ...], as_list: bool) -> None:
    frames = COLOURS if shape == (3, 5, 7) else GREYS
    x: Any = [frames[:4], frames[4:7]] if as_list else np.stack([frames[:4], frames[4:8]])
    first = np.moveaxis(frames, -1, 1) if frames.ndim == 4 else frames
    model = videos(shape)
    source = open_source(model.graph, {"x": x}, model._parameter())
    seen, drawn = (
        batch["x"].numpy() for batch in (model.prepare(x=x), source.take(torch.arange(2)))
    )
    expected = first[:4].reshape(4, -1)
    np.testing.assert_allclose(seen[:4, 0], (expected + 0.5) / 256, rtol=1e-6)
    assert source.pixels == {"x": "dequantise"}
    assert np.array_equal((drawn[:4, 0] * 256).astype(int), expected)
    assert float(seen.max()) < 1
    run = fit(model, {"x": x}, steps=1, batch=2, progress=False)
    assert any(row.get("kind") == "pixels prepared" for row in run.rows)


def test_rows_of_bytes_per_step_are_numbers() -> None:
    """A vector of bytes per step is a column of a table, as it is without time."""
    assert not holds_pixels(videos((7,)).graph, "x", GREYS)
    ones = (np.stack([GREYS, GREYS]) > 128).astype(np.uint8)
    assert not holds_pixels(videos((1, 5, 7), Bernoulli).graph, "x", ones)


@pytest.mark.parametrize("family", [ContinuousBernoulli, Bernoulli, Poisson])
@pytest.mark.parametrize("of", ["images", "videos", "list of videos"])
def test_masked_bytes_are_missing_pixels(family: Any, of: str) -> None:
    """Known pixels are prepared as without the mask, and the masked ones are missing."""
    model = small((1, 5, 7), family) if of == "images" else videos((1, 5, 7), family)
    gone = np.random.default_rng(1).random(GREYS.shape) < 0.3
    x: Any = np.ma.array(GREYS, mask=gone)
    plain: Any = GREYS
    if of == "videos":
        x, plain = x.reshape(3, 3, 5, 7), plain.reshape(3, 3, 5, 7)
    if of == "list of videos":
        x, plain = [x[:4], x[4:7]], [plain[:4], plain[4:7]]
    known, whole = model.prepare(x=x), model.prepare(x=plain)
    there = known["x?"]
    torch.testing.assert_close(known["x"], torch.where(there, whole["x"], 0.0))
    count = {"images": 9, "videos": 9, "list of videos": 7}[of]
    assert int((~there).sum()) == int(gone[:count].sum())
    source = open_source(model.graph, {"x": x}, model._parameter())
    assert source.pixels.keys() == {"x"}
    drawn = source.take(torch.arange(source.n))
    assert torch.equal(drawn["x?"], there)
    tolerance = 0.5 / 256 if family is ContinuousBernoulli else 0
    assert float((drawn["x"] - known["x"]).abs().max()) <= tolerance + 1e-6
    all_gone = np.ma.array(GREYS, mask=True)
    assert not holds_pixels(small((1, 5, 7)).graph, "x", all_gone)


def test_videos_of_a_file_are_pixels(tmp_path: Path) -> None:
    np.save(tmp_path / "videos.npy", np.stack([GREYS[:4], GREYS[4:8]]))
    loaded = load(str(tmp_path / "videos.npy"), videos((1, 5, 7)).graph)
    assert (loaded.recipe.prepare, loaded.recipe.levels) == ("dequantise", 256)
    levels = np.asarray(loaded.train.data["x"])
    assert 0 < levels.min() < levels.max() < 1


# Data sets of the command line --------------------------------------------------------------------


def test_a_folder_is_a_data_set_of_the_command_line(folders: Path, tmp_path: Path) -> None:
    model = zoo["cvae"]((3, 5, 7), 2, 2, net="conv", channels=(3,), hidden=(6,))
    found = load(str(folders / "colours"), model.graph, hold_out=0.3)
    assert found.test is not None
    assert found.recipe.prepare == "dequantise"
    assert (found.recipe.image, found.recipe.classes) == ([5, 7], ["cat", "dog"])
    assert sorted([*found.train.data["y"], *found.test.data["y"]]) == [0] * 4 + [1] * 5
    assert np.array_equal(found.train.data["y"], found.train.labels)
    (tmp_path / "data.json").write_text(found.recipe.text())
    recipe = type(found.recipe).read(tmp_path)
    # Other rows are prepared like those of training: here in colours, with the same classes.
    other = load(str(folders / "greys"), model.graph, like=recipe)
    assert other.train.data["x"].shape == (9, 5, 7, 3)
    assert other.recipe.folder
    sized = load(str(folders / "greys"), zoo["vae"]((1, 4, 6)).graph, size=(4, 6))
    assert sized.train.data["x"].shape == (9, 4, 6)
    with pytest.raises(ValueError, match="--size is for a folder of images"):
        load("digits", model.graph, size=(4, 6))


def test_convolutions_and_pictures_from_the_command_line(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from aevb.cli import main
    from aevb.cli.model_argument import resolve
    from aevb.cli.train_table import names_table

    def command(*words: Any) -> str:
        monkeypatch.setattr("sys.argv", ["aevb", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            main()
        out, error = capsys.readouterr()
        assert stop.value.code == 0, error
        return str(out)

    settings = {"net": "conv", "channels": "[3]", "hidden": "[6]", "z": "2"}
    out = tmp_path / "run"
    options = [f"--set={name}={value}" for name, value in settings.items()]
    options += ["--steps=2", "--hold-out=0.3", f"--out={out}"]
    printed = command("train", "vae", "--data", folders / "colours", *options)
    assert "deconv(3, hidden=6" in printed
    assert "dequantised" in printed
    assert "Images of 5×7 pixels, 2 classes (cat, dog)." in printed
    command("sample", out, "-n", 2)
    command("sample", out, "-n", 2, "--reconstruct")
    for picture, rows in (("samples", 1), ("reconstructions", 2)):
        with Image.open(out / f"{picture}.png") as opened:
            assert (opened.mode, opened.height) == ("RGB", 11 * (rows * 6 + 1))
    with pytest.raises(ValueError, match="is a folder of images. Train a model on them: aevb"):
        names_table(str(folders / "colours"))
    np.save(tmp_path / "colours.npy", COLOURS)
    for data, shape in ((str(tmp_path / "colours.npy"), (3, 5, 7)), ("digits", (1, 8, 8))):
        model = resolve("vae", data, settings)
        assert model.graph.shapes["x"] == shape
        loaded = load(data, model.graph, hold_out=0.3 if data != "digits" else 0)
        assert loaded.recipe.prepare == "dequantise"


def test_only_images_can_be_read_by_convolutions() -> None:
    with pytest.raises(ValueError, match=r'net="conv" is for images: x is \(channels, height'):
        zoo["vae"](784, net="conv")
    for name, sizes in (("vae", ()), ("cvae", (3,)), ("gmvae", (3,)), ("m2", (3,))):
        model = zoo[name]((1, 5, 7), 2, *sizes, net="conv", channels=(3, 2), hidden=(6,))
        given = {"y": torch.zeros(9).long()} if name == "cvae" else {}
        assert model.elbo(x=GREYS, **given).value.isfinite().all()


def test_pixels_are_known_by_images_of_the_whole_array() -> None:
    x = np.zeros((3000, 5, 7), np.uint8)
    x[1500:] = GREYS[0]
    assert float(small((1, 5, 7)).prepare(x=x)["x"].max()) < 1


def test_convolutions_read_counts_on_a_log_scale() -> None:
    x = torch.arange(64.0).reshape(1, 64) * 100
    nets = [conv(3, log=log).build({"x": (1, 8, 8)}, [2], (2,), ()) for log in (False, True)]
    nets[1].load_state_dict(nets[0].state_dict())
    assert torch.equal(nets[1].first({"x": x}), nets[0].first({"x": x.asinh()}))
    model = zoo["gmvae"]((1, 8, 8), 2, 3, net="conv", hidden=(6,), likelihood="Poisson")
    assert all(factor.net.log for name, factor in model.factors.items() if name[:4] in ("q(y|",))
    assert "conv(32, 64, hidden=6, init='glorot_normal', log=True)" in str(model)


def test_pictures_of_every_form(tmp_path: Path) -> None:
    path = tmp_path / "grid.png"

    def pixels(shown: Any, **options: Any) -> np.ndarray:
        grid(shown, 3, path, **options)
        with Image.open(path) as picture:
            return np.asarray(picture)

    whole = pixels(COLOURS)
    assert np.array_equal(whole[11:66:11, 11:88:11], COLOURS[0])
    assert np.array_equal(pixels(torch.as_tensor(COLOURS).movedim(-1, 1) / 255), whole)
    grey = pixels(GREYS, ink=False)
    assert np.array_equal(grey[11:66:11, 11:88:11], GREYS[0])
    assert np.array_equal(pixels(torch.as_tensor(GREYS)[:, None] / 255, ink=False), grey)
    assert np.array_equal(pixels(GREYS)[11:66:11, 11:88:11], 255 - GREYS[0])
    rows = {"data": COLOURS, "again": torch.as_tensor(COLOURS).movedim(-1, 1) / 255}
    both = pixels(rows)
    assert np.array_equal(both[:, -whole.shape[1] :][11:66], whole[11:66])
    assert both.shape[0] == 11 * (2 * 6 + 1)
    assert np.array_equal(pixels(GREYS[..., None]), pixels(GREYS))
    binary = np.eye(5, 7, dtype=np.uint8)[None]  # numbers, as in data
    assert np.array_equal(pixels(binary), pixels(binary.astype(float)))
    with pytest.raises(ValueError, match=r"got \[9, 35\]. Reshape rows of pixels"):
        pixels(GREYS.reshape(9, 35))


def test_a_folder_is_data_of_fit(folders: Path) -> None:
    model = small((3, 5, 7))
    runs = [
        fit(model.fresh(0), data, steps=2, batch=4, progress=False)
        for data in ({"x": COLOURS}, {"x": folders / "colours"}, str(folders / "colours"))
    ]
    weights = [torch.cat([p.detach().flatten() for p in run.model.parameters()]) for run in runs]
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])
    with pytest.raises(ValueError, match=r"x is a Images, not an array of numbers. Pass x.pixels"):
        model.elbo(x=aevb.data.images(folders / "colours"))
