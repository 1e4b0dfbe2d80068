"""Fields of rows, messages and turns that are read. What is not listed here is refused by name, never passed over.

A field that is null or empty says nothing, as tables have it, and is left out. ``ignore_fields`` of a source names
what may be left out though it says something.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from packhorse_service.sources.sample import BadSample

__all__ = ["ANSWERS", "NOTES", "SYSTEMS", "TOOLS", "TRAINED_IF", "is_trained", "known_fields", "one_of"]

Fields = Mapping[str, Any]

# Notes on a row: where it comes from and what it is called. They are no part of what is trained on.
NOTES = frozenset(
    (
        *("id", "_id", "idx", "index", "uid", "uuid", "message_id", "conversation_id", "prompt_id"),
        *("question_id", "task_id", "row_id", "url", "source", "dataset", "split", "subset", "category"),
        *("lang", "language", "language_score", "license", "licence", "date", "timestamp", "created", "added"),
        *("dump", "file_path", "token_count", "meta", "metadata"),
    )
)

SYSTEMS = ("system", "system_prompt")
TOOLS = ("tools", "functions", "tool_defs")
ANSWERS = ("completion", "response", "answer", "output")

# Every way to say of a turn whether it is trained on, and the value that says yes.
TRAINED_IF: Mapping[str, int] = {
    "weight": 1,
    "loss_weight": 1,
    "loss": 1,
    "loss_mask": 1,
    "train": 1,
    "training": 1,
    "trainable": 1,
    "train_on_turn": 1,
    "calculate_loss": 1,
    "masked": 0,
    "no_loss": 0,
    "ignore_loss": 0,
}


def known_fields(fields: Fields, read: Collection[str], ignored: Collection[str], where: str) -> dict[str, Any]:
    """Return the fields that say something, without the ``ignored`` ones. Raises ``BadSample`` for one not ``read``."""
    found = {name: value for name, value in fields.items() if name not in ignored and not _says_nothing(value)}
    unread = [name for name in found if name not in read]
    if unread:
        names = ", ".join(map(repr, unread))
        raise BadSample(
            f"{where} has the field{'s' if len(unread) > 1 else ''} {names}, which nothing reads; read are "
            f"{', '.join(read)}. Rename it, or name it in the source's ignore_fields (prepare: --ignore-field)"
        )
    return found


def one_of(fields: Fields, names: Collection[str], where: str) -> Any:
    """Return the value of the one field of ``names`` that is there, else ``None``. Raises ``BadSample`` for two."""
    found = [name for name in names if name in fields and not _says_nothing(fields[name])]
    if len(found) > 1:
        raise BadSample(f"{where} has {' and '.join(map(repr, found))}, which mean the same; keep one")
    return fields[found[0]] if found else None


def is_trained(fields: Fields, by_role: bool, where: str) -> bool:
    """Return whether a turn is trained on, by its fields or else by its role. Raises ``BadSample``."""
    said: dict[bool, str] = {}
    for name in TRAINED_IF.keys() & fields.keys():
        value = fields[name]
        if value is None:
            continue
        if isinstance(value, str | list | dict) or value not in (0, 1):
            raise BadSample(
                f"{where} has {name}={value!r}; a turn is trained on or not, 1 or 0 (true or false): other and "
                "fractional weights are not supported. Remove the field, or give tokens with a .loss_mask.npy"
            )
        said[(value == 1) == (TRAINED_IF[name] == 1)] = name
    if len(said) > 1:
        raise BadSample(f"{where} has {said[True]} and {said[False]}, which contradict each other; keep one")
    trained = next(iter(said), by_role)
    if trained and not by_role:
        raise BadSample(f"{where} has {said[True]}={fields[said[True]]!r}; only an assistant's turns are trained on")
    return trained


def _says_nothing(value: object) -> bool:
    return value is None or (isinstance(value, str | list | dict) and not value)
