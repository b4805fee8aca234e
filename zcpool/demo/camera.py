"""The demo's frames: a photograph seen by a camera that does not hold still."""

from __future__ import annotations

from math import cos, pi, sin
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from zcpool.demo.blazeface import SIZE, Face

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["Camera"]


class Camera:
    """Take frames of a photograph from a slowly circling hand: most of it, never twice the same part.

    Parameters
    ----------
    photo : PIL.Image.Image
        The scene, in RGB.
    """

    _PART = 0.92
    _PERIOD = 97  # frames to a turn

    def __init__(self, photo: Image.Image) -> None:
        from PIL import Image

        self._photo = photo
        self._size = (photo.width * self._PART, photo.height * self._PART)
        # Letterboxed, since the network was trained on faces of their true proportions.
        self._scale = SIZE / max(self._size)
        width, height = (max(1, round(side * self._scale)) for side in self._size)
        self._inside = (width, height)
        self._corner = ((SIZE - width) // 2, (SIZE - height) // 2)
        self._frame = Image.new("RGB", (SIZE, SIZE))

    def _box(self, number: int) -> tuple[float, float, float, float]:
        turn = 2 * pi * number / self._PERIOD
        x = (self._photo.width - self._size[0]) * (1 + cos(turn)) / 2
        y = (self._photo.height - self._size[1]) * (1 + sin(turn)) / 2
        return x, y, min(x + self._size[0], self._photo.width), min(y + self._size[1], self._photo.height)

    def shoot(self, number: int, view: npt.NDArray[np.float32]) -> None:
        """Write one frame into the network's input.

        Parameters
        ----------
        number : int
            Which frame.
        view : ndarray
            The input, of shape (1, 128, 128, 3): it receives float32 in [-1, 1].
        """
        from PIL.Image import Resampling

        self._frame.paste(self._photo.resize(self._inside, Resampling.BILINEAR, box=self._box(number)), self._corner)
        # Scaled on the way into the block and shifted there: no float array but the block itself.
        np.multiply(np.asarray(self._frame), np.float32(2 / 255), out=view[0])
        np.subtract(view, np.float32(1), out=view)

    def to_photo(self, number: int, face: Face) -> Face:
        """Convert a face from fractions of a frame to pixels of the photograph.

        Parameters
        ----------
        number : int
            The frame it was found in.
        face : Face
            What the network saw.

        Returns
        -------
        Face
            The same, in pixels.
        """
        origin = np.array(self._box(number)[:2], dtype=np.float32)
        corner = np.array(self._corner, dtype=np.float32)

        def convert(points: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
            return (points * np.float32(SIZE) - corner) / np.float32(self._scale) + origin

        return Face(face.score, convert(face.box.reshape(2, 2)).reshape(4), convert(face.keypoints))
