"""Model cards: what a model is, what it was trained on and how, and how far to trust its numbers.

A card is Markdown, and the same for the same history: it has no dates and no times.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from simfbo.core.exchange import Reason
from simfbo.errors import plain
from simfbo.runs.client_scores import ClientScores, is_column
from simfbo.runs.files import Json
from simfbo.runs.history import CHANNEL_BYTES, History
from simfbo.runs.lines import flattened
from simfbo.runs.report import describe, estimated, metrics, sentence, size

_WORST = 10  # clients in the table of scores
_SHOWN = 10  # excluded clients, and warnings
_CHANNELS = {"x": "x, the upper variable", "y": "y, the lower variable", "v": "v, which solves the "
             "linear system", "other": "other numbers", "coded": "coded messages"}  # fmt: skip
_LEVELS = {"lower": "lower (training) rows", "upper": "upper (validation) rows",
           "lower and upper": "rows, which both levels use",
           "lower plus upper": "rows of both levels together"}  # fmt: skip
_LIMITS = (
    "What is measured at the end is computed by the server, on the data of its `evaluate`.",
    "Clients' scores are measured on the upper (validation) rows of the clients that took part in "
    "training. These rows chose the upper variable x, so the scores are no test on unseen data.",
    "Clients that did not take part may differ from those that did: measure the model on theirs "
    "before you use it there.",
)


class Model(NamedTuple):
    """What a card says that the history of a run does not know.

    Attributes:
        title: of the card.
        text: what the model is.
        scores: of the clients.
        clients: their ids, in the order of the run's clients.
        sections: further ones, by title.
        limits: sentences on how far to trust the numbers.
    """

    title: str
    text: str
    scores: ClientScores | None = None
    clients: Sequence[Any] | None = None
    sections: Sequence[tuple[str, str]] = ()
    limits: Sequence[str] = _LIMITS


def card(history: History, model: Model | None = None) -> str:
    """Return the model card of a run.

    Args:
        history: of the run.
        model: what else is known; by default the result of the run is described as such.
    """
    model = _result(history) if model is None else model
    sections = (
        ("Data", _data(history.header, model.clients)),
        *model.sections,
        ("Training", _training(history)),
        ("Scores of the clients", _scores(model.scores)),
        ("Communication", _communication(history)),
        ("Privacy", _privacy(history)),
        ("Excluded replies and warnings", _excluded(history)),
        ("Limits", "\n".join(f"- {one}" for one in model.limits)),
        ("Settings", _settings(history.header)),
        ("Versions", _versions(history.header)),
    )
    parts = [f"# Model card: {model.title}", model.text]
    parts += [f"## {title}\n\n{text}" for title, text in sections]
    return "\n\n".join(parts) + "\n"


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    r"""Return a table in Markdown.

    Example:
        >>> print(table(["client", "rows"], [["a|b", 12_000]]))
        | client | rows |
        |---|---|
        | a\|b | 12,000 |
    """
    lines = [head, ["---"] * len(head), *([_cell(value) for value in row] for row in rows)]
    first, rule, *rest = lines
    return "\n".join([_row(first), "|" + "|".join(rule) + "|", *map(_row, rest)])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: Any) -> str:
    """Return a value as text that does not end a cell."""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    text = f"{value:.4g}" if isinstance(value, float) else plain(str(value), 300)
    return text.replace("|", "\\|")


def _result(history: History) -> Model:
    """Return what is said of a run whose model is not known."""
    header = history.header
    task = describe(header["config"])
    text = (
        f"The variables x and y of a bilevel problem, {task}, trained with {header['algorithm']}: "
        "every client keeps its data, and x is chosen so that y, which is trained for it, has a "
        "small upper loss."
    )
    return Model(f"{header['algorithm']} on {task}", text, history.client_scores)


def _data(header: Json, clients: Sequence[Any] | None) -> str:
    """Return how many rows the clients have."""
    if header.get("private"):
        return "Not listed: the numbers of rows are no part of what privacy is guaranteed for."
    samples = header.get("samples")
    if not samples:
        return "How many rows each client has is not known to the server."
    levels: list[str] = list(samples)
    parts: list[Json] = list(samples.values())
    count, head = parts[0]["clients"], [_LEVELS.get(level, level) for level in levels]
    totals = ", ".join(f"{one['total']:,} {name}" for name, one in zip(head, parts, strict=True))
    text = f"{count:,} client{'s' * (count != 1)}; {totals}.\n\n"
    if "each" not in parts[0]:
        names = {"fewest": "least", "median": "median", "most": "most"}
        rows = [[name, *(_whole(one[key]) for one in parts)] for name, key in names.items()]
        return text + table(["of a client", *head], rows)
    ids = range(count) if clients is None else clients
    return text + table(
        ["client", *head],
        [[str(one), *row] for one, *row in zip(ids, *(one["each"] for one in parts), strict=True)],
    )


def _whole(number: float) -> float:
    return int(number) if number == int(number) else number


def _training(history: History) -> str:
    """Return how long a run took, how it ended, and its result."""
    if not history.records:
        return "The run ended before its first evaluation."
    header, last, end = history.header, history.records[-1], history.end or {}
    status = end.get("status", "stopped without an end record")
    why = f" ({end['reason']})" if end.get("reason") else ""
    lines = [f"{header['algorithm']}, {last['round']:,} of at most {header['rounds']:,} "
             f"iterations: {status}{why}."]  # fmt: skip
    if history.verdict is not None:
        lines.append(f"{sentence(history.verdict['text'])}.")
    found = [(name.replace("_", " "), last[name]) for name in metrics(history)
             if not is_column(name) and name != "epsilon"]  # fmt: skip
    text = " ".join(lines)
    return f"{text}\n\n{table(['measured at the end', 'value'], found)}" if found else text


def _scores(scores: ClientScores | None) -> str:
    """Return mean, worst client and quantiles of every metric, and the worst clients."""
    if scores is None:
        return "Not measured."
    rows = [
        [name, scores.mean(name), scores.worst(name).value, str(scores.worst(name).client),
         *scores.quantiles(name)] for name in scores.values
    ]  # fmt: skip
    head = ["metric", "mean", "worst", "worst client", "10 %", "median", "90 %"]
    ranked, first = scores.ranked, next(iter(scores.values))
    each = [
        [str(scores.ids[k]), f"{100 * scores.weights[k]:.3g} %",
         *(float(column[k]) for column in scores.values.values())] for k in ranked[:_WORST]
    ]  # fmt: skip
    some = len(ranked) > _WORST
    title = f"The worst {_WORST} of {len(ranked):,} clients" if some else "All clients"
    text = f"{table(head, rows)}\n\n{title}, by {first.replace('_', ' ')}:\n\n"
    return text + table(["client", "weight", *scores.values], each)


def _communication(history: History) -> str:
    """Return the bytes that were sent, by direction and by channel."""
    if not history.records:
        return "Nothing is recorded."
    last = history.records[-1]
    rows = [["to the clients", size(last["bytes_down"])], ["back", size(last["bytes_up"])]]
    for name in CHANNEL_BYTES:
        if last.get(name):
            rows.append([f"of both: {_CHANNELS[name.removeprefix('bytes_')]}", size(last[name])])
    if last.get("bytes_evaluation"):
        rows.append(["in addition, for evaluations on clients", size(last["bytes_evaluation"])])
    count = f"{last['communication_rounds']:,} exchanges with clients{estimated(last)}."
    return f"{count}\n\n{table(['sent, over all clients', 'bytes'], rows)}"


def _privacy(history: History) -> str:
    """Return the guarantee, or that there is none."""
    header = history.header
    privacy = header["config"].get("privacy")
    if not privacy and not header.get("private"):
        return (
            "Not differentially private: no noise was added. Rows stay with their clients, but "
            "the server can recover rows from messages, some exactly, and the model can reveal "
            "whose rows it was trained on."
        )
    found = history.records[-1].get("epsilon") if history.records else None
    if not privacy or found is None:
        return (
            "Messages are clipped and noise is added. Epsilon was not recorded: compute it with "
            "`simfbo.privacy.epsilon`."
        )
    return (
        f"Differentially private for each client: epsilon {found:.4g} at delta "
        f"{privacy['delta']:g}. Messages are clipped, and the {privacy['where']} adds noise."
    )


def _excluded(history: History) -> str:
    """Return who was excluded and why, and the warnings."""
    words = {known.value: known.text for known in Reason}
    counts = Counter((line["client"], line["reason"]) for line in history.refusals)
    rows = [[str(client), f"the client {words.get(reason, reason)}", count]
            for (client, reason), count in counts.most_common(_SHOWN)]  # fmt: skip
    parts = ["No reply was excluded."]
    if rows:
        clients = len({client for client, _ in counts})
        text = f"{len(history.refusals):,} replies of {clients:,} clients; most frequent:"
        parts = [f"{text}\n\n{table(['client', 'reason', 'replies'], rows)}"]
    lines = [f"- Iteration {one['round']:,}: {one['text']}." for one in history.warnings[:_SHOWN]]
    if more := len(history.warnings) - len(lines):
        lines.append(f"- {more:,} more in the history.")
    return "\n\n".join([*parts, "\n".join(lines) or "No client's messages stood out."])


def _settings(header: Json) -> str:
    """Return the configuration or, without one, the numbers that the run was built with."""
    given = header["config"] or {
        key: (header.get("inputs") or {}).get(key) or {} for key in ("algorithm", "federation")
    }
    rows = [[f"`{key}`", _text(value)] for key, value in flattened(given) if value is not None]
    own = [["`seed`", str(header["seed"])]] if "seed" in header and "seed" not in given else []
    return table(["setting", "value"], [*rows, *own]) if rows or own else "Not recorded."


def _text(value: Any) -> str:
    """Return a setting as it is written in Python, texts without quotes."""
    return value if isinstance(value, str) else repr(value)


def _versions(header: Json) -> str:
    found = header.get("versions") or {}
    return ", ".join(f"{name} {one}" for name, one in found.items()) + "." if found else "Unknown."
