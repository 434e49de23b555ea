"""A camera with a detector: drops JPEGs into `pictures/empty` and `pictures/person`."""

from pathlib import Path

import numpy as np
from PIL import Image

rng = np.random.default_rng(0)
for number in range(200):
    label = "person" if rng.random() < 0.2 else "empty"
    pixels = rng.integers(0, 60, (48, 64, 3), dtype=np.uint8)
    if label == "person":
        pixels[10:40, 20:35] += 150
    folder = Path("pictures") / label
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(folder / "new.part", "JPEG")
    (folder / "new.part").rename(folder / f"{number:05}.jpg")
