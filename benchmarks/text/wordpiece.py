"""BERT's tokenizer for lower-case models: words and punctuation, then the longest known pieces."""

import unicodedata
from collections.abc import Mapping, Sequence

import numpy as np

_LONGEST = 100  # characters of a word; longer ones are unknown


def vocabulary(data: bytes) -> dict[str, int]:
    r"""Return the number of every piece in a vocab.txt.

    Example:
        >>> vocabulary(b"[PAD]\nthe\n##m\n")
        {'[PAD]': 0, 'the': 1, '##m': 2}
    """
    return {piece: i for i, piece in enumerate(data.decode().removesuffix("\n").split("\n"))}


def encode(
    texts: Sequence[str], pieces: Mapping[str, int], length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the pieces' numbers [N, length] and a mask of the same shape: 1 where there is one.

    Args:
        texts: the texts.
        pieces: numbers from `vocabulary`.
        length: pieces per text, [CLS] and [SEP] among them; the rest is cut off.
    """
    ids = np.full((len(texts), length), pieces["[PAD]"], np.int32)
    mask = np.zeros((len(texts), length), np.float32)
    for row, text in enumerate(texts):
        found = [i for word in words(text) for i in _pieces(word, pieces)][: length - 2]
        found = [pieces["[CLS]"], *found, pieces["[SEP]"]]
        ids[row, : len(found)], mask[row, : len(found)] = found, 1
    return ids, mask


def words(text: str) -> list[str]:
    """Split a text into lower-case words without accents and single marks of punctuation.

    Example:
        >>> words("Café, isn't it?")
        ['cafe', ',', 'isn', "'", 't', 'it', '?']
    """
    kept = "".join(_cleaned(sign) for sign in text)
    plain = unicodedata.normalize("NFD", kept.lower())
    plain = "".join(sign for sign in plain if unicodedata.category(sign) != "Mn")
    return "".join(f" {sign} " if _stands_alone(sign) else sign for sign in plain).split()


def _cleaned(sign: str) -> str:
    """Return a space for any white space, and nothing for control characters."""
    if sign.isspace():
        return " "
    return "" if sign == "\ufffd" or unicodedata.category(sign).startswith("C") else sign


def _stands_alone(sign: str) -> bool:
    """Return whether a character is punctuation, any ASCII symbol or a Chinese character."""
    if sign.isascii():
        return sign.isprintable() and not sign.isalnum() and sign != " "
    return unicodedata.category(sign).startswith("P") or "CJK" in unicodedata.name(sign, "")


def _pieces(word: str, pieces: Mapping[str, int]) -> list[int]:
    """Return the numbers of the longest known pieces from the left; that of [UNK] if there is none.

    Example:
        >>> _pieces("them", {"[UNK]": 0, "the": 1, "##m": 2})
        [1, 2]
    """
    found, start = [], 0
    while start < len(word):
        prefix = "##" if start else ""
        ends = range(len(word), start, -1) if len(word) <= _LONGEST else ()
        end = next((end for end in ends if prefix + word[start:end] in pieces), None)
        if end is None:
            return [pieces["[UNK]"]]
        found.append(pieces[prefix + word[start:end]])
        start = end
    return found
