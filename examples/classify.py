"""Run texts through an artefact.

python examples/classify.py ARTEFACT [TEXT …]
"""

import sys

import bertopt


def main() -> None:
    if len(sys.argv) == 1:
        sys.exit(__doc__)
    directory, *texts = sys.argv[1:]
    predictor = bertopt.load(directory)
    texts = texts or ["a text", "another"]
    for text, answer in zip(texts, predictor(texts), strict=True):
        print(text, "→", answer)


if __name__ == "__main__":
    main()
