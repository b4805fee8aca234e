"""BlazeFace, short range: from the raw outputs of the network to faces.

The network looks at 896 anchors: two for each cell of a 16 x 16 grid, six for each cell of an 8 x 8 grid. For each
anchor it gives a score and sixteen numbers: centre and size of a box and six keypoints, in pixels of the 128 x 128
input, relative to the anchor.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["KEYPOINTS", "SIZE", "Face", "anchors", "decode"]

Array = npt.NDArray[np.floating[Any]]

SIZE = 128
KEYPOINTS = ("right eye", "left eye", "nose", "mouth", "right ear", "left ear")
_GRIDS = ((16, 2), (8, 6))
# exp() of a float32 overflows beyond 88, and a score this sure is 0 or 1 anyway.
_MAX_LOGIT = 80.0


@dataclass(frozen=True)
class Face:
    """One face, in fractions of the network's input: 0 is left or top, 1 is right or bottom."""

    score: float
    box: Array  # x0, y0, x1, y1
    keypoints: Array  # one (x, y) for each of KEYPOINTS


@cache
def anchors() -> Array:
    """Return the 896 anchor centres.

    Returns
    -------
    ndarray
        Shape (896, 2): x and y in fractions of the input. It is shared, so it is read-only.
    """
    grids = []
    for cells, repeats in _GRIDS:
        centres = (np.arange(cells, dtype=np.float32) + np.float32(0.5)) / np.float32(cells)
        y, x = np.meshgrid(centres, centres, indexing="ij")
        grids.append(np.repeat(np.stack([x, y], axis=-1).reshape(-1, 2), repeats, axis=0))
    result: Array = np.concatenate(grids)
    result.setflags(write=False)
    return result


def decode(
    regressors: npt.NDArray[Any], logits: npt.NDArray[Any], *, min_score: float = 0.5, max_overlap: float = 0.3
) -> list[Face]:
    """Decode the network's outputs.

    Parameters
    ----------
    regressors : ndarray
        896 times 16 numbers.
    logits : ndarray
        896 scores, before the sigmoid.
    min_score : float, optional
        Anchors with a lower score are left out.
    max_overlap : float, optional
        Boxes that overlap more (intersection over union) are the same face.

    Returns
    -------
    list of Face
        Best score first.
    """
    clipped = np.clip(logits.reshape(-1), -_MAX_LOGIT, _MAX_LOGIT)
    scores = 1.0 / (1.0 + np.exp(-clipped))
    chosen = np.flatnonzero(scores >= min_score)
    chosen = chosen[np.argsort(-scores[chosen], kind="stable")]
    points = regressors.reshape(-1, 8, 2)[chosen] / np.float32(SIZE)
    half = points[:, 1] / 2
    points[:, 2:] += anchors()[chosen, None]
    centre = points[:, 0] + anchors()[chosen]
    points[:, 0] = centre - half
    points[:, 1] = centre + half
    return _merge(points, scores[chosen], max_overlap)


def _merge(points: Array, scores: Array, max_overlap: float) -> list[Face]:
    """Blend the boxes of each face, weighted by score: steadier from frame to frame than keeping the best alone."""
    faces = []
    while len(scores):
        same = _overlap(points[0], points) > max_overlap
        same[0] = True  # whatever its area
        weights = scores[same] / scores[same].sum()
        blended = np.tensordot(weights, points[same], axes=1).astype(np.float32)
        faces.append(Face(float(scores[0]), blended[:2].reshape(4), blended[2:]))
        points, scores = points[~same], scores[~same]
    return faces


def _overlap(one: Array, many: Array) -> Array:
    """Return intersection over union of one box and many."""
    sides = np.minimum(one[1], many[:, 1]) - np.maximum(one[0], many[:, 0])
    shared: Array = np.prod(np.maximum(sides, 0), axis=-1)
    union = np.prod(one[1] - one[0]) + np.prod(many[:, 1] - many[:, 0], axis=-1) - shared
    result: Array = np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)
    return result
