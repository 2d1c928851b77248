"""Check and prepare the texts that callers give, before anything is run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set, Sized
from typing import Any

from bertopt.errors import UsageError
from bertopt.modeling.sentence_transformers import NO_PROMPTS
from bertopt.spec import Text

#: The columns of texts and of second texts in tables, as in files of labelled texts.
FIRST, SECOND = "text", "text_pair"
#: Tasks of models that take pairs.
PAIRED = ("text-classification", "question-answering")


def refuse_others(texts: Any) -> None:
    """Raise TypeError that says what to give instead, for an object that does not iterate over texts in a known order."""
    expected, kind = "texts must be a list of texts", type(texts).__name__
    if isinstance(texts, str):
        raise TypeError("expected a list of texts; got one string: put it in a list")
    if isinstance(texts, bytes | bytearray):
        raise TypeError(f"expected a list of texts; got one {kind} object: decode it and put it in a list")
    if isinstance(texts, Mapping):
        raise TypeError(f"{expected}; got {kind}: give list(texts.values()) or list(texts)")
    if isinstance(texts, Set) and not hasattr(texts, "mapping"):  # views of a dict keep its order
        raise TypeError(f"{expected}; got {kind}, which has no order: give sorted(texts)")
    if hasattr(texts, "columns"):
        raise TypeError(f"{expected}; got {kind}, a table: give one column, such as table['text']")
    if not hasattr(texts, "__iter__") and not hasattr(texts, "__getitem__"):
        raise TypeError(f"texts must be a list or another iterable of texts; got {kind}")
    if getattr(texts, "ndim", 1) != 1:
        raise TypeError(f"{expected}; got {kind} with {texts.ndim} dimensions: give one of them")


def as_list(texts: Iterable[Text]) -> Sequence[Text]:
    """Return the texts as a list or tuple. Raises TypeError where they are not an iterable with a known order."""
    if isinstance(texts, list | tuple):
        return texts
    refuse_others(texts)
    kind = type(texts).__name__
    items = list(texts)
    if isinstance(texts, Sized) and len(texts) != len(items):
        raise TypeError(f"{kind}, whose length is {len(texts)}, gave {len(items)} items: give a list of texts")
    return items


def asked(task: str, texts: Sequence[str]) -> list[Text]:
    """Return texts as a model for `task` takes them: for question answering, as contexts of one fixed question."""
    return [("what?", text) for text in texts] if task == "question-answering" else list(texts)


def usual_pair(task: str, column: str) -> str | None:
    """Return the column of second texts that belongs to `column`, if there may be one: without it, a re-ranker would score the queries alone,
    which looks right."""
    return SECOND if task in PAIRED and column == FIRST else None


def from_json(texts: Sequence[Any]) -> list[Any]:
    """Return texts with pairs as tuples again, which JSON turned into lists."""
    return [tuple(text) if isinstance(text, list) else text for text in texts]


def prompted(texts: Sequence[Text], prompts: Mapping[str, str], name: str, left_out: bool) -> Sequence[Text]:
    """Put the prompt `name` before each text, as sentence-transformers does.

    Raises UsageError where there is no such prompt, where the model's pooling leaves prompts out (`left_out`), and for a pair, since it is
    unclear which text the prompt is for.
    """
    if left_out:
        raise UsageError(f"prompt_name: an artefact {NO_PROMPTS}: leave prompt_name out, or use sentence-transformers for texts with a prompt")
    if name not in prompts:
        have = f"its prompts are {', '.join(map(ascii, prompts))}" if prompts else "it has no prompts: put one before the text"
        raise UsageError(f"prompt_name: the model has no prompt {ascii(name)[:100]}; {have}")
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise UsageError(f"prompt_name goes with single texts; texts[{number}] is a pair: leave prompt_name out")
    return [prompts[name] + text for text in texts if isinstance(text, str)]


def refuse_lone_pair(texts: Sequence[Text]) -> None:
    """Raise TypeError for a tuple of two strings: a model that takes pairs would treat it as two texts."""
    if isinstance(texts, tuple) and len(texts) == 2 and all(isinstance(part, str) for part in texts):
        raise TypeError("expected a list of texts; got a tuple of two strings: give a pair as [(a, b)], two texts as [a, b]")


def check(texts: Sequence[Text], paired: bool, first: int = 0) -> None:
    """Check every item; `first` is the number of the first. With `paired`, each must be a (question, context) pair.

    Raises TypeError for an item that is neither a string nor a pair of strings, UsageError for a missing pair and for
    text that is not valid Unicode.
    """
    for number, text in enumerate(texts, first):
        pair = isinstance(text, tuple) and len(text) == 2 and all(isinstance(part, str) for part in text)
        if not (isinstance(text, str) or pair):
            given: Any = text
            shown = f"a {type(given).__name__} of {len(given)}" if isinstance(given, list | tuple) else type(given).__name__
            raise TypeError(f"texts[{number}] must be a string, or a tuple of two strings for a pair; got {shown}")
        if paired and not pair:
            raise UsageError(f"texts[{number}] must be a pair (question, context) for question-answering")
        for part in (text,) if isinstance(text, str) else text:
            if not part.isascii():
                check_unicode(part, f"texts[{number}]")


def only_strings(texts: Sequence[Text]) -> list[str]:
    """Return `texts`, which were checked, as a list. Raises TypeError for a pair among them."""
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"texts[{number}] must be a string; got a pair: the second text of each pair is made of a label")
    return [text for text in texts if isinstance(text, str)]


def with_query(query: object, passages: Iterable[Text]) -> list[tuple[str, str]]:
    """Return the pair of the query with each passage.

    Raises TypeError where one of them is not a string, UsageError where it is not valid Unicode.
    """
    pairs: list[tuple[str, str]] = []
    if not isinstance(query, str):
        raise TypeError(f"query must be a string; got {type(query).__name__}")
    check_unicode(query, "query")
    for number, passage in enumerate(as_list(passages)):
        if not isinstance(passage, str):
            raise TypeError(f"passages[{number}] must be a string; got {type(passage).__name__}")
        check_unicode(passage, f"passages[{number}]")
        pairs.append((query, passage))
    return pairs


def check_unicode(text: str, name: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{name} has a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}, which is "
            "no valid Unicode; read the text with errors='replace', or mend it"
        ) from error
