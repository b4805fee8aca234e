"""Traces: what a camera's pipeline acquires and releases, frame by frame, always the same for a seed.

A detector looks at each frame, an aligner cuts out the faces it found, an embedder turns each into a vector. Frames,
pictures and tensors have the sizes these have in practice, and live as long as the stage that reads them.

    pipeline   one camera and three models; the tracker keeps the last frames; the number of faces varies
    burst      the same, at times a burst of large stills is taken, kept together, and processed one by one
    drift      models are switched, and with them every size: input, batch, scratch memory, the camera's resolution
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

from .native import CJob, COp, make_job

FRAMES = 150
FLOAT = 4  # bytes


@dataclass(frozen=True)
class Trace:
    """Steps of (slot, bytes): acquire so many into a slot, or release (0) what is in it."""

    name: str
    ops: tuple[tuple[int, int], ...]
    slots: int
    peak_bytes: int  # the most that is live at a time

    def make_job(self, touch_bytes: int) -> CJob:
        ops = (COp * len(self.ops))(*self.ops)
        return make_job(touch_bytes=touch_bytes, ops=ops, slot_count=self.slots)


class Recorder:
    """Writes down what is acquired and released; knows what is live."""

    def __init__(self) -> None:
        self.ops: list[tuple[int, int]] = []
        self.live: dict[int, int] = {}  # slot: bytes
        self.free: list[int] = []
        self.live_bytes = self.peak_bytes = self.slots = 0

    def acquire(self, nbytes: int) -> int:
        """Return the slot."""
        if not self.free:
            self.free.append(self.slots)
            self.slots += 1
        slot = self.free.pop()
        self.ops.append((slot, nbytes))
        self.live[slot] = nbytes
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return slot

    def release(self, *slots: int) -> None:
        for slot in slots:
            self.live_bytes -= self.live.pop(slot)
            self.ops.append((slot, 0))
            self.free.append(slot)

    def finish(self, name: str) -> Trace:
        """Release what is live, and return the trace."""
        self.release(*self.live)
        return Trace(name, tuple(self.ops), self.slots, self.peak_bytes)


def nv12(width: int, height: int) -> int:
    return width * height * 3 // 2


def rgb(width: int, height: int) -> int:
    return width * height * 3


def detect(r: Recorder, side: int, batch: int = 1) -> None:
    """Letterbox, turn into floats, run: feature maps live in pairs, the scores outlive them for a moment."""
    letterbox = r.acquire(batch * rgb(side, side))
    tensor = r.acquire(batch * rgb(side, side) * FLOAT)
    r.release(letterbox)
    before = tensor
    for stride, channels in ((4, 32), (8, 64), (16, 128), (32, 256)):
        after = r.acquire(batch * (side // stride) ** 2 * channels * FLOAT)
        r.release(before)
        before = after
    scores = r.acquire(batch * (side // 8) ** 2 * 21 * FLOAT)
    r.release(before)
    boxes = r.acquire(256 * 16)
    r.release(scores, boxes)


def embed(r: Recorder, rng: random.Random, faces: int) -> list[int]:
    """Crop all, align and embed one after the other; return the embeddings."""
    sides = [rng.randint(60, 420) for _ in range(faces)]
    crops = [r.acquire(rgb(side, side * 5 // 4)) for side in sides]
    embeddings = []
    for crop in crops:
        aligned = r.acquire(rgb(112, 112))
        tensor = r.acquire(rgb(112, 112) * FLOAT)
        r.release(crop, aligned)
        embeddings.append(r.acquire(512 * FLOAT))
        r.release(tensor)
    return embeddings


def faces_in(rng: random.Random) -> int:
    return max(0, round(rng.gauss(4, 3)))


def pipeline(seed: int) -> Trace:
    rng, r = random.Random(seed), Recorder()
    kept: deque[list[int]] = deque()
    for _ in range(FRAMES):
        frame, picture = r.acquire(nv12(1920, 1080)), r.acquire(rgb(1920, 1080))
        detect(r, 640)
        kept.append([frame, *embed(r, rng, faces_in(rng))])
        r.release(picture)
        if len(kept) > 20:
            r.release(*kept.popleft())
    return r.finish("pipeline")


def burst(seed: int) -> Trace:
    rng, r = random.Random(seed), Recorder()
    kept: deque[list[int]] = deque()
    stills: deque[int] = deque()
    for number in range(FRAMES):
        frame = r.acquire(nv12(1920, 1080))
        detect(r, 320)
        kept.append([frame, *embed(r, rng, faces_in(rng))])
        if len(kept) > 4:
            r.release(*kept.popleft())
        if number % 40 == 20:
            stills.extend(r.acquire(nv12(4000, 3000)) for _ in range(rng.randint(4, 7)))
        if stills:
            picture = r.acquire(rgb(4000, 3000))
            detect(r, 640)
            r.release(*embed(r, rng, rng.randint(10, 40)), picture, stills.popleft())
    return r.finish("burst")


def drift(seed: int) -> Trace:
    rng, r = random.Random(seed), Recorder()
    kept: deque[list[int]] = deque()
    arena: list[int] = []
    for number in range(FRAMES):
        if number % 15 == 0:
            side = rng.choice((128, 192, 256, 320, 416, 512, 640))
            batch = rng.choice((1, 2, 4, 6))
            width, height = rng.choice(((640, 480), (1280, 720), (1920, 1080), (2560, 1440)))
            weights = [r.acquire(rng.randint(2 << 20, 12 << 20)) for _ in range(rng.randint(2, 5))]
            r.release(*arena)  # the old model ends when the new one runs
            arena = weights
        frame, picture = r.acquire(nv12(width, height)), r.acquire(rgb(width, height))
        detect(r, side, batch)
        kept.append([frame, *embed(r, rng, faces_in(rng))])
        r.release(picture)
        if len(kept) > 8:
            r.release(*kept.popleft())
    return r.finish("drift")


def all_traces(seed: int = 1) -> list[Trace]:
    """Return the traces."""
    return [make(seed) for make in (pipeline, burst, drift)]
