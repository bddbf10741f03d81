"""Model cards: a model's data, training, scores, cost, privacy and limits, in Markdown.

A card is determined by the history: it has no dates and no times.
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
_SHOWN = 10  # excluded clients and warnings
_CHANNELS = {
    "x": "x, the upper variable",
    "y": "y, the lower variable",
    "v": "v, which solves the linear system",
    "other": "other numbers",
    "coded": "coded messages",
}
_LEVELS = {
    "lower": "lower (training) rows",
    "upper": "upper (validation) rows",
    "lower and upper": "rows, which both levels use",
    "lower plus upper": "rows of both levels together",
}
_LIMITS = (
    "What is measured at the end is computed by the server, on the data of its `evaluate`.",
    "Clients' scores are measured on the upper (validation) rows of the clients that took part in "
    "training. These rows chose the upper variable x, so the scores are no test on unseen data.",
    "Clients that did not take part may differ from those that did: measure the model on theirs "
    "before you use it there.",
)


class Model(NamedTuple):
    """The parts of a card that the history of a run does not contain.

    Attributes:
        title: of the card.
        text: a description of the model.
        scores: of the clients.
        clients: their ids, in the order of the run's clients.
        sections: additional (title, text) pairs.
        limits: sentences on the validity of the numbers.
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
        model: the remaining parts; by default they describe the variables x and y of the run.
    """
    model = _default_model(history) if model is None else model
    sections = (
        ("Data", _data(history.header, model.clients)),
        *model.sections,
        ("Training", _training(history)),
        ("Scores of the clients", _scores(model.scores)),
        ("Communication", _communication(history)),
        ("Privacy", _privacy(history)),
        ("Excluded replies and warnings", _excluded(history)),
        ("Limits", "\n".join(f"- {limit}" for limit in model.limits)),
        ("Settings", _settings(history.header)),
        ("Versions", _versions(history.header)),
    )
    blocks = [f"# Model card: {model.title}", model.text]
    blocks += [f"## {title}\n\n{text}" for title, text in sections]
    return "\n\n".join(blocks) + "\n"


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    r"""Return a table in Markdown.

    Example:
        >>> print(table(["client", "rows"], [["a|b", 12_000]]))
        | client | rows |
        |---|---|
        | a\|b | 12,000 |
    """
    body = [_row([_cell(value) for value in row]) for row in rows]
    return "\n".join([_row(head), "|" + "---|" * len(head), *body])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: Any) -> str:
    """Format a value, with vertical bars escaped."""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    text = f"{value:.4g}" if isinstance(value, float) else plain(str(value), 300)
    return text.replace("|", "\\|")


def _default_model(history: History) -> Model:
    header = history.header
    task = describe(header["config"])
    text = (
        f"The variables x and y of a bilevel problem, {task}, trained with {header['algorithm']}: "
        "every client keeps its data, and x is chosen so that y, which is trained for it, has a "
        "small upper loss."
    )
    return Model(f"{header['algorithm']} on {task}", text, history.client_scores)


def _data(header: Json, clients: Sequence[Any] | None) -> str:
    if header.get("private"):
        return "Not listed: the numbers of rows are no part of what privacy is guaranteed for."
    samples = header.get("samples")
    if not samples:
        return "How many rows each client has is not known to the server."
    levels: list[str] = list(samples)
    statistics: list[Json] = list(samples.values())
    count, head = statistics[0]["clients"], [_LEVELS.get(level, level) for level in levels]
    totals = ", ".join(
        f"{level['total']:,} {name}" for name, level in zip(head, statistics, strict=True)
    )
    text = f"{count:,} client{'s' * (count != 1)}; {totals}.\n\n"
    if "each" not in statistics[0]:
        names = {"fewest": "least", "median": "median", "most": "most"}
        rows = [
            [name, *(_without_fraction(level[key]) for level in statistics)]
            for name, key in names.items()
        ]
        return text + table(["of a client", *head], rows)
    ids = range(count) if clients is None else clients
    columns = [level["each"] for level in statistics]
    rows = [[str(client), *counts] for client, *counts in zip(ids, *columns, strict=True)]
    return text + table(["client", *head], rows)


def _without_fraction(number: float) -> float:
    return int(number) if number == int(number) else number


def _training(history: History) -> str:
    """Describe length, outcome and result of a run."""
    if not history.records:
        return "The run ended before its first evaluation."
    header, last, end = history.header, history.records[-1], history.end or {}
    status = end.get("status", "stopped without an end record")
    reason = f" ({end['reason']})" if end.get("reason") else ""
    text = (
        f"{header['algorithm']}, {last['round']:,} of at most {header['rounds']:,} "
        f"iterations: {status}{reason}."
    )
    if history.verdict is not None:
        text += f" {sentence(history.verdict['text'])}."
    values = [
        (name.replace("_", " "), last[name])
        for name in metrics(history)
        if not is_column(name) and name != "epsilon"
    ]
    return f"{text}\n\n{table(['measured at the end', 'value'], values)}" if values else text


def _scores(scores: ClientScores | None) -> str:
    """Tabulate mean, worst client and quantiles of every metric, and the worst clients."""
    if scores is None:
        return "Not measured."
    rows = []
    for name in scores.values:
        worst = scores.worst(name)
        quantiles = scores.quantiles(name)
        rows.append([name, scores.mean(name), worst.value, str(worst.client), *quantiles])
    head = ["metric", "mean", "worst", "worst client", "10 %", "median", "90 %"]
    ranked, first = scores.ranked, next(iter(scores.values))
    clients = []
    for k in ranked[:_WORST]:
        values = [float(column[k]) for column in scores.values.values()]
        clients.append([str(scores.ids[k]), f"{100 * scores.weights[k]:.3g} %", *values])
    truncated = len(ranked) > _WORST
    title = f"The worst {_WORST} of {len(ranked):,} clients" if truncated else "All clients"
    text = f"{table(head, rows)}\n\n{title}, by {first.replace('_', ' ')}:\n\n"
    return text + table(["client", "weight", *scores.values], clients)


def _communication(history: History) -> str:
    """Tabulate the transmitted bytes by direction and channel."""
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
    """Describe the privacy guarantee, if there is one."""
    header = history.header
    privacy = header["config"].get("privacy")
    if not privacy and not header.get("private"):
        return (
            "Not differentially private: no noise was added. Rows stay with their clients, but "
            "the server can recover rows from messages, some exactly, and the model can reveal "
            "whose rows it was trained on."
        )
    epsilon = history.records[-1].get("epsilon") if history.records else None
    if not privacy or epsilon is None:
        return (
            "Messages are clipped and noise is added. Epsilon was not recorded: compute it with "
            "`simfbo.privacy.epsilon`."
        )
    return (
        f"Differentially private for each client: epsilon {epsilon:.4g} at delta "
        f"{privacy['delta']:g}. Messages are clipped, and the {privacy['where']} adds noise."
    )


def _excluded(history: History) -> str:
    """Tabulate rejected replies by client and reason, and list the warnings."""
    words = {reason.value: reason.text for reason in Reason}
    counts = Counter((line["client"], line["reason"]) for line in history.refusals)
    rows = [
        [str(client), f"the client {words.get(reason, reason)}", count]
        for (client, reason), count in counts.most_common(_SHOWN)
    ]
    replies = "No reply was excluded."
    if rows:
        clients = len({client for client, _ in counts})
        text = f"{len(history.refusals):,} replies of {clients:,} clients; most frequent:"
        replies = f"{text}\n\n{table(['client', 'reason', 'replies'], rows)}"
    shown = history.warnings[:_SHOWN]
    lines = [f"- Iteration {warning['round']:,}: {warning['text']}." for warning in shown]
    if more := len(history.warnings) - len(lines):
        lines.append(f"- {more:,} more in the history.")
    warnings = "\n".join(lines) or "No client's messages stood out."
    return f"{replies}\n\n{warnings}"


def _settings(header: Json) -> str:
    """Tabulate the configuration or, without one, the recorded numbers of the objects."""
    settings = header["config"] or {
        key: (header.get("inputs") or {}).get(key) or {} for key in ("algorithm", "federation")
    }
    rows = [
        [f"`{key}`", value if isinstance(value, str) else repr(value)]
        for key, value in flattened(settings)
        if value is not None
    ]
    if "seed" in header and "seed" not in settings:
        rows.append(["`seed`", str(header["seed"])])
    return table(["setting", "value"], rows) if rows else "Not recorded."


def _versions(header: Json) -> str:
    versions = header.get("versions") or {}
    if not versions:
        return "Unknown."
    return ", ".join(f"{name} {version}" for name, version in versions.items()) + "."
