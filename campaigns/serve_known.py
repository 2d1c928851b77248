"""Texts and the answers that an artefact gives to them without a server: what the answers of one under load are held to."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np

import bertopt

#: Connections at once, and texts to choose from.
CLIENTS, POOL = 64, 1000


class Known:
    """Texts, and what the artefact answers to them when it is called without a server."""

    def __init__(self, artifact: Path, count: int = POOL) -> None:
        rng = random.Random(7)
        predictor = bertopt.load(artifact)
        words = sorted(word for word in predictor.tokenizer.fast.get_vocab() if word.isalpha())
        lengths = [min(100, int(rng.lognormvariate(2.5, 0.8)) + 3) for _ in range(count)]
        self.texts = [" ".join(rng.choices(words, k=length)) for length in lengths]
        self.tokens = len(predictor.tokenizer.flat(self.texts).flat.ids) / count
        vectors = np.concatenate([predictor([text]) for text in self.texts])
        self.vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        # What another batch may do to a text's outputs, and how near the nearest other text is: wrong must be between.
        again = predictor(self.texts)
        self.noise = float(np.linalg.norm(again / np.linalg.norm(again, axis=1, keepdims=True) - self.vectors, axis=1).max())
        near = self.vectors @ self.vectors.T - 2 * np.eye(count)
        self.nearest = float(np.sqrt(max(0.0, 2 - 2 * near.max())))
        self.limit = max(1e-5, 4 * self.noise)
        if self.nearest < 2 * self.limit:
            sys.exit(f"two texts' answers differ by {self.nearest:g}, a batch's by {self.noise:g}: this artefact cannot show wrong answers")
        self.worst = 0.0

    def right(self, numbers: list[int], answer: Any) -> bool:
        vectors = np.asarray(answer, np.float64)
        if vectors.shape != (len(numbers), self.vectors.shape[1]):
            return False
        error = float(np.linalg.norm(vectors - self.vectors[numbers], axis=1).max())
        self.worst = max(self.worst, error)
        return error <= self.limit

    def request(self, rng: random.Random, most: int = 16) -> tuple[list[int], bytes]:
        many = rng.choices((1, rng.randint(2, most), 100 if most == 16 else most), (50, 45, 5 if most == 16 else 0))[0]
        numbers = rng.choices(range(len(self.texts)), k=many)
        return numbers, json.dumps({"inputs": [self.texts[number] for number in numbers]}).encode()
